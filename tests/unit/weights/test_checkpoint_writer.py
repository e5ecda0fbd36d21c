"""Where a checkpoint may be written, and what a copy keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from k3ray.config.numeric import ExpertFormat
from k3ray.config.presets import PRESETS
from k3ray.errors import CheckpointError
from k3ray.model.checkpoint_codec import converted, random_source, same_bytes
from k3ray.weights.checkpoint import Checkpoint
from k3ray.weights.checkpoint_writer import write_checkpoint

TINY = PRESETS["k3-tiny"]
NORM = "language_model.model.layers.2.input_layernorm.weight"
A_LOG = "language_model.model.layers.1.self_attn.A_log"


def write(out: Path, *, seed: int = 0, overwrite: bool = False) -> None:
    write_checkpoint(out, TINY, ExpertFormat.MXFP4, random_source(TINY, seed), overwrite=overwrite)


def refused(out: Path, kind: str, *, overwrite: bool = False) -> None:
    with pytest.raises(CheckpointError) as caught:
        write(out, overwrite=overwrite)
    assert caught.value.fields["kind"] == kind


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    out, source = tmp_path / "out", random_source(TINY, 1)

    def slow(spec: Any) -> Any:
        if spec.name == NORM:
            write(out, seed=2)  # somebody else is faster
        return source(spec)

    with pytest.raises(CheckpointError, match="exists") as caught:
        write_checkpoint(out, TINY, ExpertFormat.MXFP4, slow)
    assert caught.value.fields["kind"] == "exists"
    write(tmp_path / "second", seed=2)
    kept, second = (Checkpoint.open(tmp_path / name) for name in ("out", "second"))
    assert kept.read(NORM) == second.read(NORM)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "second"]


def test_only_checkpoints_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "text").write_text("years of work")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("thesis", "file", "link", "dangling"):
        refused(tmp_path / name, "exists", overwrite=True)
        refused(tmp_path / name, "exists")
    assert (tmp_path / "thesis" / "text").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", overwrite=True)
    write(tmp_path / "empty", seed=1, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "dangling", "empty", "file", "link", "thesis",
    ]  # fmt: skip


def test_names_that_cannot_be_are_typed_errors(tmp_path: Path) -> None:
    refused(tmp_path / ("a" * 300), "write")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file" / "out", "write")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["out", "q[1]", "a*b"])
def test_what_a_dead_writer_left_goes_and_a_living_writer_is_left_alone(
    tmp_path: Path, name: str
) -> None:
    dead = tmp_path / f".{name}.k3ray-writing-0123456789ab"
    dead.mkdir()
    (dead / "part").write_text("x")
    began, go_on = threading.Event(), threading.Event()
    source = random_source(TINY, 1)

    def waiting(spec: Any) -> Any:
        if spec.name == NORM:
            began.set()
            assert go_on.wait(60.0)
        return source(spec)

    first = threading.Thread(
        target=write_checkpoint, args=(tmp_path / name, TINY, ExpertFormat.MXFP4, waiting)
    )
    first.start()
    assert began.wait(60.0)
    assert not dead.exists()
    # Another process, which may see other process numbers: only the lock tells.
    script = (
        "import sys; from pathlib import Path; from k3ray.weights.checkpoint_writer import _sweep;"
        "_sweep(Path(sys.argv[1]), sys.argv[2])"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), f".{name}.k3ray-writing-"], check=True
    )
    go_on.set()
    first.join()
    assert Checkpoint.open(tmp_path / name).tensors
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("wanted", [ExpertFormat.MXFP4, ExpertFormat.BF16])
@pytest.mark.parametrize(("name", "data"), [(A_LOG, b"\0\0\xc0\x7f"), (NORM, b"\x80\x7f")])
def test_a_copy_refuses_what_is_not_finite(
    tmp_path: Path, wanted: ExpertFormat, name: str, data: bytes
) -> None:
    write(tmp_path / "bad")
    opened = Checkpoint.open(tmp_path / "bad")
    path, stored = opened.tensors[name]
    with path.open("r+b") as file:
        file.seek(stored.offset)
        file.write(data)
    source = same_bytes(opened) if wanted is opened.experts else converted(opened)
    with pytest.raises(CheckpointError) as caught:
        write_checkpoint(tmp_path / "copy", TINY, wanted, source)
    assert caught.value.fields["kind"] == "number"
    assert [p.name for p in tmp_path.iterdir()] == ["bad"]


def test_a_copy_keeps_the_tokenizer_and_the_configs_other_keys(tmp_path: Path) -> None:
    write(tmp_path / "from")
    (tmp_path / "from" / "tokenizer.json").write_text("{}")
    (tmp_path / "from" / ".cache").write_text("not this")
    file = tmp_path / "from" / "config.json"
    document = json.loads(file.read_text())
    document["media_placeholder_token_id"] = 21
    document["text_config"]["max_length"] = 20
    file.write_text(json.dumps(document))
    opened = Checkpoint.open(tmp_path / "from")
    write_checkpoint(
        tmp_path / "to", opened.model, ExpertFormat.BF16, converted(opened),
        extras=opened.extras(), keep=opened.config_document(),
    )  # fmt: skip
    copy = Checkpoint.open(tmp_path / "to")
    kept = json.loads((tmp_path / "to" / "config.json").read_text())
    assert (kept["media_placeholder_token_id"], kept["text_config"]["max_length"]) == (21, 20)
    assert "quantization_config" not in kept["text_config"]
    assert (tmp_path / "to" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "to" / ".cache").exists()
    assert copy.model == opened.model


def test_names_in_errors_cannot_forge_lines(tmp_path: Path) -> None:
    write(tmp_path / "out")
    os.rename(
        tmp_path / "out" / "model-00001-of-000006.safetensors",
        tmp_path / "out" / "a\nerror[fake]: b\x1b[31m.safetensors",
    )
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path / "out")
    assert caught.value.message.isprintable()
