"""The weight store: atomic entries, digests, parallel writers, full disks."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from k3ray.errors import StoreError
from k3ray.weights.manifest import EntryKind, content_digest
from k3ray.weights.names import expert_tensor_names, is_dense_name, parse_expert_tensor
from k3ray.weights.shard import write_shard_file
from k3ray.weights.store import StagedEntry, WeightStore
from k3ray.weights.version import WeightVersion


def tensors(seed: int, num: int = 3) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"t.{seed}.{i}": rng.standard_normal((i + 1, 7)).astype(np.float32) for i in range(num)}


def commit(store: WeightStore, step: int, seeds=(0, 1), kind="version") -> WeightVersion:
    staged = store.stage("main", kind, step)
    shards = [store.write_shard(staged, f"part-{s}", tensors(s)) for s in seeds]
    return store.commit(staged, shards, {"note": "x"})


def test_round_trip_is_bit_equal_and_readable_by_safetensors(tmp_path):
    store = WeightStore(tmp_path)
    version = commit(store, 3)
    entry = store.open("main", str(version))
    assert entry.version == version
    assert entry.manifest.meta == {"note": "x"}
    read = entry.read(entry.names())
    for name, array in {**tensors(0), **tensors(1)}.items():
        assert read[name].tobytes() == array.tobytes()
        assert read[name].shape == array.shape
    read["t.0.0"] += 1  # writable
    direct = load_file(entry.path / "part-0.safetensors")
    assert direct["t.0.1"].tobytes() == tensors(0)["t.0.1"].tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.float64(2.5),
        np.zeros((0, 3), np.float32),
        np.arange(12, dtype=np.int64).reshape(3, 4).T,
        np.array([True, False]),
    ],
    ids=["scalar", "empty", "transposed", "bool"],
)
def test_odd_arrays_round_trip(tmp_path, array):
    store = WeightStore(tmp_path)
    staged = store.stage("main", "checkpoint", 0)
    store.commit(staged, [store.write_shard(staged, "s", {"a": np.asarray(array)})])
    read = store.latest("main", "checkpoint").read(["a"])["a"]
    np.testing.assert_array_equal(read, array)
    assert read.dtype == np.asarray(array).dtype


def test_digest_does_not_depend_on_the_partition(tmp_path):
    store = WeightStore(tmp_path)
    all_tensors = {**tensors(0), **tensors(1)}
    one = store.stage("main", "version", 1)
    together = store.write_shard(one, "all", all_tensors)
    two = store.stage("main", "version", 1)
    apart = [store.write_shard(two, name.replace(".", "-"), {name: a})
             for name, a in all_tensors.items()]  # fmt: skip
    assert content_digest([together]) == content_digest(apart)
    changed = dict(all_tensors)
    changed["t.0.0"] = changed["t.0.0"] + 1
    assert content_digest([store.write_shard(one, "x", changed)]) != content_digest(apart)


def test_commit_again_is_a_no_op_and_kinds_are_apart(tmp_path):
    store = WeightStore(tmp_path)
    assert commit(store, 5) == commit(store, 5)
    assert len(store.entries("main")) == 1
    checkpoint = commit(store, 5, kind="checkpoint")
    assert store.latest("main", EntryKind.CHECKPOINT).version == checkpoint
    assert store.latest("main").manifest.kind is EntryKind.VERSION
    assert store.open("main", checkpoint, EntryKind.CHECKPOINT).name.startswith("checkpoint-")


def test_latest_and_delete(tmp_path):
    store = WeightStore(tmp_path)
    assert store.latest("main") is None
    old, new = commit(store, 1), commit(store, 12)
    assert store.latest("main").version == new
    store.delete("main", new)
    store.delete("main", new)
    assert store.latest("main").version == old
    with pytest.raises(StoreError, match="no readable entry"):
        store.open("main", new)


@pytest.mark.parametrize("where", ["data", "header", "manifest", "truncated", "manifest_gone"])
def test_corruption_is_detected_and_hides_no_older_entry(tmp_path, where):
    store = WeightStore(tmp_path)
    good, bad = commit(store, 1), commit(store, 2)
    folder = store.open("main", bad).path
    shard = folder / "part-1.safetensors"
    if where == "data":
        data = bytearray(shard.read_bytes())
        data[-3] ^= 0x10
        shard.write_bytes(bytes(data))
    elif where == "header":
        # Offsets come from the manifest, so a damaged header cannot mislead a read.
        data = bytearray(shard.read_bytes())
        data[20] ^= 0x01
        shard.write_bytes(bytes(data))
        store.open("main", bad).verify()
        return
    elif where == "manifest":
        text = (folder / "manifest.json").read_text()
        (folder / "manifest.json").write_text(text.replace('"step": 2', '"step": 3'))
    elif where == "truncated":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        (folder / "manifest.json").unlink()
    if where == "data":
        entry = store.open("main", bad)
        with pytest.raises(StoreError, match=r"t\.1\.2 .* digest does not match"):
            entry.read(entry.names())
        assert entry.read(["t.0.0"])
        return
    assert store.latest("main").version == good
    assert list(store.damaged("main")) == [folder.name]
    with pytest.raises(StoreError):
        store.open("main", bad)


def test_missing_or_short_shard_and_doubled_tensor_do_not_commit(tmp_path):
    store = WeightStore(tmp_path)
    staged = store.stage("main", "version", 1)
    info = store.write_shard(staged, "a", tensors(0))
    twin = store.write_shard(staged, "b", tensors(0))
    with pytest.raises(StoreError, match="lies in two shards"):
        store.commit(staged, [info, twin])
    os.truncate(Path(staged.path) / "a.safetensors", 10)
    with pytest.raises(StoreError, match="has 10 bytes"):
        store.commit(staged, [info])
    assert store.entries("main") == ()


def test_bad_names_are_refused(tmp_path):
    store = WeightStore(tmp_path)
    with pytest.raises(StoreError, match="not a line name"):
        store.stage("../x", "version", 0)
    with pytest.raises(StoreError, match="not a weight version"):
        store.open("main", "newest")
    commit(store, 1)
    latest = store.latest("main")
    with pytest.raises(StoreError, match="has no tensor nope"):
        latest.read(["nope"])
    with pytest.raises(StoreError, match="dtype complex128"):
        store.write_shard(store.stage("main", "version", 2), "s", {"c": np.zeros(2, complex)})


def test_full_disk_raises_and_leaves_nothing(tmp_path):
    """RLIMIT_FSIZE makes write() fail in a child exactly as a full disk does."""
    code = textwrap.dedent("""
        import resource, sys, numpy as np
        from k3ray.errors import StoreError
        from k3ray.weights.store import WeightStore
        store = WeightStore(sys.argv[1])
        staged = store.stage("main", "version", 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            store.write_shard(staged, "big", {"x": np.ones(10_000)})
        except StoreError as error:
            print("refused", error.fields["errno"])
    """)
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused")
    assert WeightStore(tmp_path).entries("main") == ()
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 4096


def _write_part(args: tuple[str, StagedEntry, int]):
    root, staged, part = args
    return WeightStore(root).write_shard(staged, f"part-{part}", tensors(part, 20))


def test_parallel_writers_from_other_processes(tmp_path):
    store = WeightStore(tmp_path)
    staged = store.stage("main", "version", 1)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        shards = list(pool.map(_write_part, [(str(tmp_path), staged, p) for p in range(4)]))
    version = store.commit(staged, shards)
    entry = store.open("main", version)
    assert len(entry.read(entry.names())) == 80
    entry.verify()


WRITER = textwrap.dedent("""
    import sys, numpy as np
    from k3ray.weights.store import WeightStore
    store = WeightStore(sys.argv[1])
    print("ready", flush=True)
    for step in range(int(sys.argv[2]), 100_000):
        staged = store.stage("main", "version", step)
        rng = np.random.default_rng(step)
        shards = [
            store.write_shard(staged, f"s{i}", {f"x.{i}": rng.standard_normal(5000)})
            for i in range(3)
        ]
        store.commit(staged, shards)
""")


def test_writer_killed_at_random_moments_leaves_only_whole_entries(tmp_path):
    store = WeightStore(tmp_path)
    rng = np.random.default_rng(0)
    start = 0
    for _ in range(12):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(start)],
            stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        assert process.stdout.readline() == b"ready\n"
        time.sleep(float(rng.uniform(0, 0.05)))  # the moment of the kill, not a synchronisation
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert store.damaged("main") == {}
        for entry in store.entries("main"):
            entry.verify()
            start = max(start, entry.manifest.step + 1)
    left = store.sweep("main", older_than_s=-1.0)
    assert left <= 12
    assert list((tmp_path / "main" / ".staging").iterdir()) == []


def test_failed_replace_leaves_no_temporary(tmp_path):
    with pytest.raises(StoreError, match="cannot write shard"):
        write_shard_file(tmp_path / "gone" / "a.safetensors", "a", tensors(0))


def test_names_and_versions():
    names = expert_tensor_names(2, 0) + expert_tensor_names(2, 5)
    assert len(names) == 6
    parsed = parse_expert_tensor(names[3] + ".adam_v")
    assert (parsed.layer, parsed.expert, parsed.matrix, parsed.moment) == (2, 5, "w1", ".adam_v")
    assert not is_dense_name(names[0])
    assert is_dense_name("lm_head.weight")
    assert not is_dense_name("lm_head.weight.adam_m")
    version = WeightVersion(line="main", step=3, digest="0123456789abcdef" * 2)
    assert str(WeightVersion.parse(str(version))) == str(version)
