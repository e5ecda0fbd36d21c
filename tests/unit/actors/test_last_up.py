"""What was brought up last is read back as it was, or refused."""

import pytest

from k3ray.actors.last_up import LastUp
from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.supernode import EndpointConfig, SupernodeSpec
from k3ray.errors import SupernodeError


def test_it_is_read_back_as_it_was(tmp_path):
    spec = SupernodeSpec(
        preset="k3-tiny", groups=2, partition=((0, 1, 2), (3, 4, 5, 6, 7)), seed=3,
        endpoint=EndpointConfig(port=8123),
    )  # fmt: skip
    last = LastUp(spec=spec, cluster=LocalClusterConfig(dashboard_port=9000), port=8123)
    last.write(tmp_path / "last-up.json")
    assert LastUp.read(tmp_path / "last-up.json") == last


def test_nothing_is_none_and_rubbish_is_refused(tmp_path):
    file = tmp_path / "last-up.json"
    assert LastUp.read(file) is None
    for rubbish in (b"{", b"\xff\xfe", b'{"spec": {}, "cluster": {}, "colour": 1}'):
        file.write_bytes(rubbish)
        with pytest.raises(SupernodeError, match="cannot be understood"):
            LastUp.read(file)
