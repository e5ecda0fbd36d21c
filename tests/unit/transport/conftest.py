"""The contract runs over every transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from transport_world import World


@pytest.fixture(params=["inprocess", "ipc", "tcp"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(kind=request.param, socket_dir=tmp_path, stack=stack)
