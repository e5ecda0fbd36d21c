"""Checkpoints in the release's layout: whole or refused, visible at once or not at all."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from k3ray.config.numeric import ExpertFormat
from k3ray.config.presets import PRESETS
from k3ray.errors import CheckpointError
from k3ray.model.checkpoint_codec import check_numbers, converted, random_source, same_bytes
from k3ray.weights.checkpoint import Checkpoint
from k3ray.weights.checkpoint_writer import write_checkpoint
from k3ray.weights.safetensors_io import StoredTensor

TINY = PRESETS["k3-tiny"]
LAYER = "language_model.model.layers.2."


def write(out: Path, experts: ExpertFormat = ExpertFormat.MXFP4, seed: int = 0) -> Path:
    write_checkpoint(out, TINY, experts, random_source(TINY, seed))
    return out


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("good") / "checkpoint")


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return folder / str(index["weight_map"][name])


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def poke(folder: Path, name: str, data: bytes) -> None:
    """Overwrite the first bytes of a tensor."""
    path, stored = Checkpoint.open(folder).tensors[name]
    with path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(data)


def rewrite(folder: Path, name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the file of a tensor by the reference implementation."""
    path = shard_of(folder, name)
    with safe_open(path, "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    change(tensors)
    save_file(tensors, path)


NORM, ROUTER = f"{LAYER}input_layernorm.weight", f"{LAYER}block_sparse_moe.gate.weight"
EXPERT = f"{LAYER}block_sparse_moe.experts.5.w2"
INDEX = "model.safetensors.index.json"


def _truncate(folder: Path) -> None:
    path = shard_of(folder, NORM)
    os.truncate(path, path.stat().st_size - 3)


def _trailing(folder: Path) -> None:
    with shard_of(folder, NORM).open("ab") as file:
        file.write(b"\0\0")


def _header_bomb(folder: Path) -> None:
    path = shard_of(folder, NORM)
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def _offsets(header: dict[str, Any]) -> None:
    header[NORM]["data_offsets"] = [0, 128]


def _drop_from_both(folder: Path) -> None:
    rewrite(folder, NORM, lambda t: t.pop(NORM))
    edit_json(folder / INDEX, lambda d: d["weight_map"].pop(NORM))


def _extra_in_both(folder: Path) -> None:
    rewrite(folder, NORM, lambda t: t.update({f"{LAYER}extra.weight": torch.zeros(2)}))
    file = shard_of(folder, NORM).name
    edit_json(folder / INDEX, lambda d: d["weight_map"].update({f"{LAYER}extra.weight": file}))


def _set(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, name, lambda t: t.update({name: tensor}))


BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "no config": ("config", lambda f: (f / "config.json").unlink()),
    "config is no JSON": ("config", lambda f: (f / "config.json").write_text("{", "utf-8")),
    "unknown config key": ("config", lambda f: edit_json(
        f / "config.json", lambda d: d["text_config"].update(hidden_sizes=1))),
    "another architecture": ("config", lambda f: edit_json(
        f / "config.json", lambda d: d["text_config"].update(hidden_act="silu"))),
    "no index": ("missing", lambda f: (f / INDEX).unlink()),
    "index is no JSON": ("index", lambda f: (f / INDEX).write_text("[]", "utf-8")),
    "index leaves the folder": ("index", lambda f: edit_json(
        f / INDEX, lambda d: d["weight_map"].update({NORM: "../model.safetensors"}))),
    "a file is missing": ("missing", lambda f: shard_of(f, NORM).unlink()),
    "a file too many": ("extra", lambda f: shutil.copy(shard_of(f, NORM), f / "z.safetensors")),
    "index names another file": ("misplaced", lambda f: edit_json(
        f / INDEX, lambda d: d["weight_map"].update(
            {NORM: "model-00001-of-000006.safetensors"}))),
    "tensor missing in the index": ("extra", lambda f: edit_json(
        f / INDEX, lambda d: d["weight_map"].pop(NORM))),
    "tensor missing in its file": ("missing", lambda f: rewrite(
        f, NORM, lambda t: t.pop(NORM))),
    "tensor missing": ("missing", _drop_from_both),
    "tensor extra": ("extra", _extra_in_both),
    "truncated": ("truncated", _truncate),
    "empty file": ("truncated", lambda f: shard_of(f, NORM).write_bytes(b"")),
    "header longer than the file": ("truncated", _header_bomb),
    "header is no JSON": ("header", lambda f: shard_of(f, NORM).write_bytes(
        struct.pack("<Q", 4) + b"\x80\x04]q")),
    "bytes after the last tensor": ("trailing", _trailing),
    "overlapping tensors": ("offsets", lambda f: edit_header(shard_of(f, NORM), _offsets)),
    "negative size": ("header", lambda f: edit_header(
        shard_of(f, NORM), lambda h: h[NORM].update(shape=[-64]))),
    "unknown dtype": ("dtype", lambda f: edit_header(
        shard_of(f, NORM), lambda h: h[NORM].update(dtype="F16"))),
    "dtype is no text": ("dtype", lambda f: edit_header(
        shard_of(f, NORM), lambda h: h[NORM].update(dtype=["F32"]))),
    "sizes beyond any file": ("shape", lambda f: edit_header(
        shard_of(f, NORM), lambda h: h[NORM].update(shape=[10**18] * 9))),
    "a pipe for a file": ("unreadable", lambda f: (
        shard_of(f, NORM).unlink(), os.mkfifo(f / "model-00003-of-000006.safetensors"))),
    "a pipe for the index": ("unreadable", lambda f: (
        (f / INDEX).unlink(), os.mkfifo(f / INDEX))),
    "a pipe for the config": ("unreadable", lambda f: (
        (f / "config.json").unlink(), os.mkfifo(f / "config.json"))),
    "an endless index": ("unreadable", lambda f: (
        (f / INDEX).unlink(), (f / INDEX).symlink_to("/dev/zero"))),
    "a huge config": ("unreadable", lambda f: os.truncate(f / "config.json", 1 << 33)),
    "a name twice in the index": ("index", lambda f: (f / INDEX).write_text(
        (f / INDEX).read_text("utf-8").replace('_map": {', '_map": {"a":"b","a":"b",'), "utf-8")),
    "another total size": ("index", lambda f: edit_json(
        f / INDEX, lambda d: d["metadata"].update(total_size=5))),
    "total size is no number": ("index", lambda f: edit_json(
        f / INDEX, lambda d: d["metadata"].update(total_size="abc"))),
    "far more experts": ("missing", lambda f: edit_json(
        f / "config.json", lambda d: d["text_config"].update(num_experts=60_000))),
    "experts beyond reason": ("config", lambda f: edit_json(
        f / "config.json", lambda d: d["text_config"].update(num_experts=10**12))),
    "layers beyond reason": ("config", lambda f: edit_json(
        f / "config.json", lambda d: d["text_config"].update(num_hidden_layers=10**9))),
    "layers that are no numbers": ("config", lambda f: edit_json(
        f / "config.json", lambda d: d["text_config"]["linear_attn_config"].update(
            kda_layers=[1, [2], 3]))),
    "end token outside the vocabulary": ("config", lambda f: edit_json(
        f / "config.json", lambda d: (d.update(eos_token_id=10**6),
                                      d["text_config"].update(eos_token_id=10**6)))),
    "vision that is no section": ("config", lambda f: edit_json(
        f / "config.json", lambda d: d.update(vision_config=[]))),
    "other shape": ("shape", _set(NORM, torch.ones(65, dtype=torch.bfloat16))),
    "transposed": ("shape", lambda f: rewrite(
        f, ROUTER, lambda t: t.update({ROUTER: t[ROUTER].T.contiguous()}))),
    "other dtype": ("dtype", _set(NORM, torch.ones(64))),
    "two expert formats": ("format", lambda f: rewrite(f, NORM, lambda t: t.update(
        {f"{EXPERT}.weight": torch.zeros(32, 32)})) or edit_json(f / INDEX, lambda d: d[
            "weight_map"].update({f"{EXPERT}.weight": shard_of(f, NORM).name}))),
    "NaN": ("number", lambda f: poke(f, NORM, b"\xc0\x7f")),
    "infinity": ("number", lambda f: poke(f, NORM, b"\x80\x7f")),
    "NaN scale": ("number", lambda f: poke(f, f"{EXPERT}.weight_scale", b"\xff")),
    "scale beyond float32": ("number", lambda f: (
        poke(f, f"{EXPERT}.weight_packed", b"\x77"), poke(f, f"{EXPERT}.weight_scale", b"\xfe"))),
}  # fmt: skip


def read_whole(folder: Path) -> int:
    return sum(1 for _ in check_numbers(Checkpoint.open(folder)))


def test_a_good_one_reads_and_the_reference_implementation_reads_it(good: Path) -> None:
    opened = Checkpoint.open(good)
    assert opened.model == TINY
    assert opened.experts is ExpertFormat.MXFP4
    assert read_whole(good) == len(opened.tensors) == 320
    for path in sorted(good.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                assert file.get_tensor(name).view(torch.uint8).numpy().tobytes() == bytes(
                    opened.read(name)
                )


@pytest.mark.parametrize("case", BROKEN)
def test_broken_ones_are_refused_by_kind(case: str, good: Path, tmp_path: Path) -> None:
    kind, breaks = BROKEN[case]
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    breaks(folder)
    with pytest.raises(CheckpointError) as refused:
        read_whole(folder)
    assert refused.value.fields["kind"] == kind
    assert refused.value.remedy


def test_any_distribution_over_files_is_read(good: Path, tmp_path: Path) -> None:
    opened = Checkpoint.open(good)
    tensors = {}
    for path in good.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    shutil.copy(good / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    single = Checkpoint.open(tmp_path)
    assert single.tensors.keys() == opened.tensors.keys()
    assert all(single.read(name) == opened.read(name) for name in opened.tensors)


def test_no_file_is_unpickled(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    torch.save({"a": torch.zeros(1)}, shard_of(folder, NORM))
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)


def test_copies_keep_every_byte_and_packed_experts_survive_a_round_trip(
    good: Path, tmp_path: Path
) -> None:
    opened = Checkpoint.open(good)
    write_checkpoint(tmp_path / "copy", TINY, opened.experts, same_bytes(opened))
    copy = Checkpoint.open(tmp_path / "copy")
    assert all(copy.read(name) == opened.read(name) for name in opened.tensors)
    for experts in (ExpertFormat.BF16, ExpertFormat.FP32):
        write_checkpoint(tmp_path / str(experts), TINY, experts, converted(opened))
        wide = Checkpoint.open(tmp_path / str(experts))
        again = tmp_path / f"{experts}-again"
        write_checkpoint(again, TINY, ExpertFormat.MXFP4, converted(wide))
        back = Checkpoint.open(again)
        dense = [n for n in opened.tensors if ".experts." not in n]
        assert all(back.read(name) == opened.read(name) for name in dense)


def test_a_folder_that_exists_is_kept_unless_asked(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    with pytest.raises(CheckpointError) as refused:
        write(folder, seed=1)
    assert refused.value.fields["kind"] == "exists"
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    write_checkpoint(folder, TINY, ExpertFormat.BF16, random_source(TINY, 1), overwrite=True)
    assert Checkpoint.open(folder).experts is ExpertFormat.BF16
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_a_failing_source_leaves_nothing(tmp_path: Path) -> None:
    source = random_source(TINY, 0)

    def failing(spec: Any) -> Any:
        if spec.name == NORM:
            raise OSError(28, "No space left on device")
        return source(spec)

    with pytest.raises(CheckpointError) as refused:
        write_checkpoint(tmp_path / "out", TINY, ExpertFormat.FP32, failing)
    assert refused.value.fields["kind"] == "write"
    assert list(tmp_path.iterdir()) == []


WRITER = """
import os, sys
from pathlib import Path
import torch
from k3ray.config.presets import PRESETS
from k3ray.model.checkpoint_codec import random_source
from k3ray.weights.checkpoint_writer import write_checkpoint
from k3ray.config.numeric import ExpertFormat
torch.set_num_threads(1)
model = PRESETS["k3-tiny"]
for number, _ in enumerate(sys.stdin):
    pid = os.fork()
    if pid == 0:
        for seed in range(1000 * number + 1, 1000 * number + 1000):
            write_checkpoint(Path(sys.argv[1]), model, ExpertFormat.FP32,
                             random_source(model, seed), overwrite=True)
    print(pid, flush=True)
    os.waitpid(pid, 0)
    print("dead", flush=True)
"""


def test_a_killed_writer_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    folder = write(tmp_path / "checkpoint", ExpertFormat.FP32)
    chance = random.Random(0)
    seen = set()
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder)], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    ) as parent:  # fmt: skip
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(20):
            parent.stdin.write("go\n")
            parent.stdin.flush()
            pid = int(parent.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.6))
            os.kill(pid, signal.SIGKILL)
            assert parent.stdout.readline() == "dead\n"
            opened = Checkpoint.open(folder)
            assert read_whole(folder) == len(opened.tensors)
            seen.add(bytes(opened.read(NORM)))
        parent.stdin.close()
    assert len(seen) > 1
    write_checkpoint(folder, TINY, ExpertFormat.FP32, random_source(TINY, 0), overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]


def test_a_file_that_shrinks_after_opening_is_refused(good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    opened = Checkpoint.open(folder)
    path, stored = opened.tensors[NORM]
    assert isinstance(stored, StoredTensor)
    os.truncate(path, stored.offset + 1)
    with pytest.raises(CheckpointError, match="ends early"):
        opened.read(NORM)
