"""Tokenise, pack, write, read back; baselines; and data sets that must not look whole."""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from k3ray.config.jobs import CurateConfig
from k3ray.curate.dataset import (
    TOKENIZER_FILE,
    check_space,
    config_identity,
    exclusive_folder,
    existing_dataset,
    finish_dataset,
)
from k3ray.curate.documents import DOCUMENTS
from k3ray.curate.pack_part import PackAndWrite
from k3ray.curate.report import DocumentFact, funnel, split_totals, unigram_baselines
from k3ray.curate.rule_pack import Pack
from k3ray.curate.rule_tokenise import Tokenise
from k3ray.curate.storage import file_sha256, write_arrow, write_json
from k3ray.errors import DataError
from k3ray.model.packed_data import PackedDataset
from k3ray.text.tokenizer import K3Tokenizer

TOKENIZER = K3Tokenizer.byte_level()
LENGTH = 16
TEXTS = ["a" * 15, "b" * 40, "c", "d" * 30, "e" * 7]


def tokenised(texts: list[str | None]) -> pa.RecordBatch:
    rows = [
        {"part": 0, "split": "train", "document": f"doc{index}", "package": "p", "path": "",
         "text": text}
        for index, text in enumerate(texts)
    ]  # fmt: skip
    return Tokenise(tokenizer=TOKENIZER)(pa.RecordBatch.from_pylist(rows, schema=DOCUMENTS))


def test_tokenise_ends_documents_and_forgets_the_dead() -> None:
    batch = tokenised(["hi", None, "[EOS]"])
    assert batch.column("document").to_pylist() == ["doc0", "doc2"]
    tokens = batch.column("tokens").to_pylist()
    assert tokens[0] == [*b"hi", TOKENIZER.eos_id]
    assert tokens[1] == [*b"[EOS]", TOKENIZER.eos_id]


def test_pack_lays_documents_end_to_end() -> None:
    batch = tokenised(list(TEXTS))
    flat = [token for tokens in batch.column("tokens").to_pylist() for token in tokens]
    packed = Pack(sequence_length=LENGTH)(batch)
    assert packed.num_rows == len(flat) // LENGTH
    kept = [token for row in packed.column("tokens").to_pylist() for token in row]
    assert kept == flat[: packed.num_rows * LENGTH]
    for row in packed.to_pylist():
        borders = row["cu_seqlens"]
        assert (borders[0], borders[-1]) == (0, LENGTH)
        assert all(left < right for left, right in itertools.pairwise(borders))
        assert len(row["documents"]) == len(borders) - 1
        inner = [
            index + 1 for index, token in enumerate(row["tokens"]) if token == TOKENIZER.eos_id
        ]
        assert list(borders[1:-1]) == [end for end in inner if end < LENGTH]
    # "a" * 15 and its [EOS] end exactly at the border: no empty piece on either side
    assert packed.column("cu_seqlens").to_pylist()[0] == [0, LENGTH]
    assert packed.column("documents").to_pylist()[0] == ["doc0"]
    assert packed.column("documents").to_pylist()[1] == ["doc1"]


def test_pack_of_too_little_is_empty() -> None:
    assert Pack(sequence_length=LENGTH)(tokenised(["short"])).num_rows == 0
    assert Pack(sequence_length=LENGTH)(tokenised([])).num_rows == 0


def config_for(folder: Path, **changes: Any) -> CurateConfig:
    return CurateConfig(out_dir=str(folder), sequence_length=LENGTH, vocab_size=513, **changes)


def build(folder: Path, *, texts: tuple[str, ...] = tuple(TEXTS)) -> dict[str, Any]:
    """A whole data set by the real steps, without Ray."""
    config = config_for(folder)
    with exclusive_folder(folder, input_bytes=0) as work:
        write = PackAndWrite(
            folder=str(work / "packed"), sequence_length=LENGTH, vocab_size=TOKENIZER.vocab_size
        )
        rows: list[dict[str, Any]] = []
        for part, split in enumerate(("train", "heldout", "train")):
            rows += write(tokenised(list(texts)), part=part, split=split).to_pylist()
        TOKENIZER.save(work / TOKENIZER_FILE)
        tokenizer = {"file": TOKENIZER_FILE, "sha256": file_sha256(work / TOKENIZER_FILE)}
        return finish_dataset(
            work, config, rows=rows, tokenizer=tokenizer, inputs={}, report={"a": 1}
        )


def test_written_data_reads_back(tmp_path: Path) -> None:
    manifest = build(tmp_path)
    data = PackedDataset.open(tmp_path)
    flat = [token for text in TEXTS for token in [*text.encode(), TOKENIZER.eos_id]]
    per_part = len(flat) // LENGTH
    assert data.num_sequences == 2 * per_part == manifest["splits"]["train"]["num_sequences"]
    assert data.sequence_length == LENGTH
    for index in (0, per_part - 1, per_part, 2 * per_part - 1):
        local = index % per_part
        tokens = data.tokens(index)
        assert tokens.dtype == np.int32
        assert tokens.tolist() == flat[local * LENGTH : (local + 1) * LENGTH]
        assert data.cu_seqlens(index)[-1] == LENGTH
        assert len(data.documents(index)) == len(data.cu_seqlens(index)) - 1
    assert PackedDataset.open(tmp_path, split="heldout").num_sequences == per_part
    assert K3Tokenizer.load(data.tokenizer_file).digest == TOKENIZER.digest
    text_bytes = sum(map(len, TEXTS))
    assert data.bytes_per_token == pytest.approx(text_bytes / (text_bytes + len(TEXTS)))
    assert existing_dataset(config_for(tmp_path)) == manifest
    assert not (tmp_path / ".work").exists()


@pytest.mark.parametrize("index", [-1, 1000])
def test_sequences_outside_are_refused(tmp_path: Path, index: int) -> None:
    build(tmp_path)
    with pytest.raises(DataError, match="sequence"):
        PackedDataset.open(tmp_path).tokens(index)


def test_no_manifest_no_data_set(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match="no whole data set"):
        PackedDataset.open(tmp_path)
    assert existing_dataset(config_for(tmp_path)) is None


@pytest.mark.parametrize("damage", ["truncate", "delete", "swap", "manifest", "format"])
def test_damage_is_noticed_on_opening(tmp_path: Path, damage: str) -> None:
    build(tmp_path)
    shard, manifest = tmp_path / "train/shard-00000.arrow", tmp_path / "manifest.json"
    match damage:
        case "truncate":
            shard.write_bytes(shard.read_bytes()[:-100])
        case "delete":
            shard.unlink()
        case "swap":
            write_arrow(shard, Pack(sequence_length=8)(tokenised(list(TEXTS))))
        case "manifest":
            manifest.write_text(manifest.read_text()[:-30])
        case "format":
            write_json(manifest, {**json.loads(manifest.read_text()), "format": "other"})
    with pytest.raises(DataError):
        PackedDataset.open(tmp_path)


def test_another_configuration_is_refused(tmp_path: Path) -> None:
    build(tmp_path)
    with pytest.raises(DataError, match="another configuration"):
        existing_dataset(config_for(tmp_path, seed=1))
    assert existing_dataset(config_for(tmp_path, num_workers=7)) is not None
    assert config_identity(config_for(tmp_path)) == config_identity(config_for(tmp_path / "b"))


def test_too_little_text_leaves_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than one sequence"):
        build(tmp_path, texts=("tiny",))
    assert existing_dataset(config_for(tmp_path)) is None


def test_two_curations_of_one_folder(tmp_path: Path) -> None:
    with (
        exclusive_folder(tmp_path, input_bytes=0),
        pytest.raises(DataError, match="another curation"),
        exclusive_folder(tmp_path, input_bytes=0),
    ):
        pytest.fail("the folder was given twice")


def test_space_is_checked_first(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="MiB free"):
        check_space(tmp_path, needed=1 << 60)


@pytest.fixture
def small_disk() -> Iterator[None]:
    """Writes beyond 2 kB fail as they do on a full disk (EFBIG instead of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_full_disk_is_a_typed_error_and_leaves_nothing(tmp_path: Path, small_disk: None) -> None:
    with pytest.raises(DataError, match="cannot write"):
        build(tmp_path, texts=("x" * 20_000,))
    assert existing_dataset(config_for(tmp_path)) is None
    assert not list(tmp_path.rglob("*.arrow*"))


def fact(document: str, reason: str | None) -> DocumentFact:
    return DocumentFact(
        document=document, package="p", split="train", part=0, size_bytes=10, text_bytes=9,
        reason=reason, fingerprint=None,
    )  # fmt: skip


def test_funnel_counts_every_document_once() -> None:
    facts = [fact("a", None), fact("b", "empty"), fact("d", "duplicate"), fact("c", "empty")]
    rows = funnel(facts, num_listed=9)
    assert rows[0] == {"step": "listed", "documents_left": 9}
    assert rows[1]["documents_left"] == 4
    steps = {row["step"]: row for row in rows}
    assert steps["empty"]["samples"] == ["b", "c"]
    assert steps["empty"]["file_bytes_dropped"] == 20
    assert rows[-1]["documents_left"] == 1


def test_baselines_by_hand() -> None:
    empty = [0] * 256
    rows = [
        {"split": "train", "byte_counts": [*empty[:97], 3, *empty[98:]], "token_counts": [3, 0]},
        {"split": "heldout", "byte_counts": [*empty[:97], 1, 1, *empty[99:]],
         "token_counts": [1, 1]},
    ]  # fmt: skip
    found = unigram_baselines(rows)
    byte_bits = -np.log2(4 / 259) - np.log2(1 / 259)
    assert found["byte_unigram"] == pytest.approx(byte_bits / 2)
    assert found["token_unigram"] == pytest.approx((-np.log2(4 / 5) - np.log2(1 / 5)) / 2)
    assert unigram_baselines(rows[:1]) == {"byte_unigram": None, "token_unigram": None}


def test_totals_of_an_empty_split() -> None:
    assert split_totals([], "heldout")["bytes_per_token"] == 0.0
