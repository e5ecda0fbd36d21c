"""GroupHandler: publishing from memory, files beside the worker thread, refusals."""

import numpy as np
import pytest
import torch

from k3ray.actors.group_handler import GroupHandler
from k3ray.config.presets import PRESETS
from k3ray.errors import PlanError, StaleVersionError, StoreError, TransportError
from k3ray.model.expert_math import finish
from k3ray.train.remote_experts import _shard_info
from k3ray.transport.protocol import Message
from k3ray.weights.manifest import EntryKind
from k3ray.weights.store import WeightStore
from tests.support.shares import only_share

CFG = PRESETS["k3-tiny"].text_config
LAYER = CFG.moe_layers[0]


def _handler(store, experts=(1, 4)):
    return GroupHandler(
        CFG, only_share(dict.fromkeys(CFG.moe_layers, experts)), store=store, line="main"
    )


def _call(handler, op, meta, *arrays):
    return finish(handler(Message(op=op, meta={"layout": 1, **meta}, arrays=arrays)))


def _load(handler, seed=3):
    meta = {"line": "main", "entry": None, "seed": seed, "step": 0, "experts": "fp32"}
    _call(handler, "train_load", meta)


def _publish(handler, store, step=0):
    staged = store.stage("main", EntryKind.VERSION, step)
    meta = {"line": "main", "step": step, "path": staged.path, "shard": "experts-group-0"}
    shard = _shard_info(_call(handler, "train_publish", meta).arrays[0])
    return str(store.commit(staged, [shard]))


def _load_from_store(handler, store, version):
    names = handler.missing_names(version)
    handler.load_version(version, store.open("main", version).read(names))


def _forward(handler, version):
    latents = np.arange(2 * CFG.routed_expert_hidden_size, dtype=np.float32).reshape(2, -1) / 50
    meta = {"version": version, "layer": LAYER}
    rows, experts = np.array([0, 1], np.int32), np.array([4, 1], np.int32)
    return _call(handler, "forward", meta, latents, rows, experts).arrays[0]


def test_a_published_version_serves_from_memory_with_the_stores_bits(tmp_path):
    store = WeightStore(tmp_path)
    trained, other = _handler(store), _handler(store)
    _load(trained)
    version = _publish(trained, store)
    assert trained.versions() == ()
    assert trained.missing_names(version) == []
    trained.load_version(version, {})
    _load_from_store(other, store, version)
    assert np.array_equal(_forward(trained, version), _forward(other, version))
    trained.drop_version(version)
    assert trained.versions() == ()


def test_a_copy_of_other_bytes_is_not_activated(tmp_path):
    store = WeightStore(tmp_path)
    one, two = _handler(store), _handler(store)
    _load(one, seed=1)
    _load(two, seed=2)
    _publish(one, store)
    version_of_two = _publish(two, store)
    assert len(one.missing_names(version_of_two)) == 3 * 2 * len(CFG.moe_layers)


def test_the_staged_copy_survives_further_training(tmp_path):
    store = WeightStore(tmp_path)
    handler = _handler(store)
    _load(handler)
    version = _publish(handler, store)
    _load(handler, seed=9)
    handler.load_version(version, {})
    other = _handler(store)
    _load_from_store(other, store, version)
    assert np.array_equal(_forward(handler, version), _forward(other, version))


def test_file_work_yields_to_the_lanes(tmp_path):
    store = WeightStore(tmp_path)
    handler = _handler(store)
    _load(handler)
    staged = store.stage("main", EntryKind.CHECKPOINT, 0)
    meta = {
        "line": "main", "step": 0, "path": staged.path, "shard": "experts-group-0", "layout": 1
    }  # fmt: skip
    work = handler(Message(op="train_save", meta=meta))
    next(work)
    finish(work)
    assert (tmp_path / "main" / ".staging").exists()


def test_writing_a_step_that_is_not_here_is_refused(tmp_path):
    store = WeightStore(tmp_path)
    handler = _handler(store)
    meta = {"line": "main", "step": 4, "path": str(tmp_path), "shard": "x"}
    with pytest.raises(StoreError, match="no step"):
        _call(handler, "train_save", meta)
    _load(handler)
    with pytest.raises(StoreError, match="step 4"):
        _call(handler, "train_save", meta)


def test_unknown_and_malformed_messages_are_typed_errors(tmp_path):
    handler = _handler(WeightStore(tmp_path))
    with pytest.raises(TransportError, match="unknown operation 'fly'"):
        _call(handler, "fly", {})
    with pytest.raises(TransportError, match="malformed 'forward'"):
        _call(handler, "forward", {"layer": LAYER})
    _load(handler)
    meta = {"line": "main", "step": 1, "attempt": 1, "micro_batch": 0, "layer": LAYER}
    latents = torch.zeros(1, CFG.routed_expert_hidden_size).numpy()
    with pytest.raises(PlanError, match=r"experts \[0\]"):
        _call(handler, "train_forward", meta, latents, np.zeros(1, np.int32), np.zeros(1, np.int32))


def test_status_names_versions_experts_and_training(tmp_path):
    store = WeightStore(tmp_path)
    handler = _handler(store)
    assert handler.status()["train"] == {
        "line": "main", "has_master": False, "step": 0, "attempt": None,
    }  # fmt: skip
    _load(handler)
    version = _publish(handler, store)
    handler.load_version(version, {})
    status = handler.status()
    assert status["versions"] == [version]
    assert status["experts"][str(LAYER)] == [1, 4]
    assert status["train"]["has_master"]
    assert status["size_bytes"] > 0


def test_a_copy_is_served_but_neither_trained_nor_published(tmp_path):
    """Group 1 owns 0 and 2 and copies 1 and 4, whose home is group 0."""
    store = WeightStore(tmp_path)
    home = _handler(store)
    every = dict.fromkeys(CFG.moe_layers, (0, 1, 2, 4))
    mine = dict.fromkeys(CFG.moe_layers, (0, 2))
    copier = GroupHandler(CFG, only_share(mine, every), store=store, line="main")
    staged = store.stage("main", EntryKind.VERSION, 0)
    shards = []
    for handler, name in ((home, "experts-group-0"), (copier, "experts-group-1")):
        _load(handler)
        meta = {"line": "main", "step": 0, "path": staged.path, "shard": name}
        shards.append(_shard_info(_call(handler, "train_publish", meta).arrays[0]))
    assert not {t.name for t in shards[0].tensors} & {t.name for t in shards[1].tensors}
    version = str(store.commit(staged, shards))
    missing = copier.missing_names(version)
    assert sorted(missing) == sorted(t.name for t in shards[0].tensors)
    home.load_version(version, {})
    copier.load_version(version, store.open("main", version).read(missing))
    assert np.array_equal(_forward(home, version), _forward(copier, version))
    tag = {"line": "main", "step": 1, "attempt": 1}
    norms = _call(copier, "train_norms", tag).arrays[0]
    assert len(norms) == 3 * 2 * len(CFG.moe_layers)
    latents = torch.zeros(1, CFG.routed_expert_hidden_size).numpy()
    meta = {**tag, "micro_batch": 0, "layer": LAYER}
    with pytest.raises(PlanError, match=r"experts \[4\]"):
        _call(
            copier, "train_forward", meta, latents, np.zeros(1, np.int32), np.full(1, 4, np.int32)
        )
    status = copier.status()
    assert status["experts"][str(LAYER)] == [0, 1, 2, 4]
    assert status["home_experts"][str(LAYER)] == [0, 2]


def _shares(**by_layout):
    return {
        int(n[1:]): only_share(dict.fromkeys(CFG.moe_layers, e))[1] for n, e in by_layout.items()
    }


def test_a_group_takes_further_experts_of_a_loaded_version_and_lets_go_of_them(tmp_path):
    store = WeightStore(tmp_path)
    whole = _handler(store, tuple(range(CFG.num_experts)))
    _load(whole)
    version = _publish(whole, store)
    handler = GroupHandler(CFG, _shares(n1=(1, 4)), store=store, line="main")
    _load_from_store(handler, store, version)
    want = _forward(handler, version)
    size = handler.status()["size_bytes"]
    for shares, held in (
        (_shares(n1=(1, 4), n2=(0, 4, 7)), [0, 1, 4, 7]),
        (_shares(n1=(1, 4)), [1, 4]),
        (_shares(n1=(1, 4), n2=(1, 4, 6)), [1, 4, 6]),
    ):
        handler.hold_layouts(shares, {version: handler.reshaped(version, shares)})
        assert handler.status()["experts"][str(LAYER)] == held
        assert np.array_equal(_forward(handler, version), want)
        assert handler.status()["size_bytes"] == size * len(held) // 2
    everyone = _handler(store, (1, 4, 6))
    _load_from_store(everyone, store, version)
    mine, theirs = handler._bank._versions[version], everyone._bank._versions[version]
    for layer in CFG.moe_layers:
        for a, b in zip(mine[layer].tensors(), theirs[layer].tensors(), strict=True):
            assert torch.equal(a, b)
    with pytest.raises(StaleVersionError, match="loaded meanwhile"):
        handler.hold_layouts(_shares(n1=(1,)), {})
    assert handler.status()["experts"][str(LAYER)] == [1, 4, 6]


def test_training_by_a_newer_layout_ends_that_by_the_one_before(tmp_path):
    store = WeightStore(tmp_path)
    handler = GroupHandler(CFG, _shares(n1=(1, 4), n2=(1, 4), n3=(0, 4)), store=store, line="main")
    _load(handler)

    def status(layout):
        return _call(handler, "train_status", {"layout": layout}).meta

    assert status(1)["has_master"]
    assert status(2)["has_master"]  # the same homes
    assert not status(3)["has_master"]
    for layout in (1, 2, 4):
        with pytest.raises(StaleVersionError, match=f"layout {layout} is not live here"):
            status(layout)
    _load_by = {"line": "main", "entry": None, "seed": 3, "step": 0, "experts": "fp32", "layout": 3}
    _call(handler, "train_load", _load_by)
    assert handler.status()["home_experts"][str(LAYER)] == [0, 4]
    only = _shares(n3=(0, 4))
    handler.hold_layouts(only, {})
    assert status(3)["has_master"]
