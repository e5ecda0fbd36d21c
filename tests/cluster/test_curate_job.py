"""The curation job on Ray Data: the same bytes for any number of workers, and its bad inputs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from k3ray.config.jobs import CurateConfig
from k3ray.errors import DataError
from k3ray.jobs.curate import run_curate
from k3ray.model.packed_data import PackedDataset
from k3ray.text.tokenizer import K3Tokenizer

pytestmark = pytest.mark.cluster
STDLIB = Path(json.__file__).parents[1]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little of the standard library, with every kind of bad file beside it."""
    root = tmp_path_factory.mktemp("corpus") / "lib"
    for name in ("json", "html", "logging", "wsgiref"):
        shutil.copytree(STDLIB / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    (root / "json" / "copy.py").write_bytes((root / "json" / "decoder.py").read_bytes())
    (root / "bad").mkdir()
    (root / "bad" / "binary.py").write_bytes(b"\0" * 4096)
    (root / "bad" / "latin.py").write_bytes(b"caf\xe9 " * 200)
    (root / "bad" / "line.py").write_text("word " * 20_000)
    (root / "bad" / "empty.py").touch()
    (root / "bad" / "gone.py").symlink_to(root / "nowhere.py")
    return root


def config_for(corpus: Path, out: Path, **changes: object) -> CurateConfig:
    values = {
        "sources": (str(corpus),), "out_dir": str(out), "vocab_size": 1024,
        "sequence_length": 64, "shard_sequences": 512, "heldout_fraction": 0.3, "seed": 1,
        "tokenizer_sample_bytes": 200_000, "num_workers": 1,
    }  # fmt: skip
    return CurateConfig.model_validate({**values, **changes})


def digests(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in ("report.json", "manifest.json", ".lock")
    }


def test_curation_end_to_end(ray_local: Path, corpus: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    first = run_curate(config_for(corpus, tmp_path / "one"), say=lines.append)
    second = run_curate(config_for(corpus, tmp_path / "two", num_workers=2), say=lines.append)
    assert first.manifest["digest"] == second.manifest["digest"]
    assert first.manifest["inputs"] == second.manifest["inputs"]
    assert digests(tmp_path / "one") == digests(tmp_path / "two")

    report = json.loads((tmp_path / "one" / "report.json").read_text())
    dropped = {row["step"]: row.get("documents_dropped", 0) for row in report["funnel"]}
    for step in ("vanished", "empty", "binary", "bad_utf8", "huge_line"):
        assert dropped[step] >= 1, step
    assert dropped["duplicate"] == 1
    samples = {row["step"]: row.get("samples") for row in report["funnel"]}
    assert samples["duplicate"] == ["lib/json/decoder.py"]  # "copy.py" is the smaller id

    bits = report["heldout_bits_per_byte"]
    assert 1.0 < bits["token_unigram"] < bits["byte_unigram"] < 8.0

    data = PackedDataset.open(tmp_path / "one")
    heldout = PackedDataset.open(tmp_path / "one", split="heldout")
    packages = [
        {name.split("/")[1] for index in range(split.num_sequences)
         for name in split.documents(index)}
        for split in (data, heldout)
    ]  # fmt: skip
    assert packages[0]
    assert packages[1]
    assert not packages[0] & packages[1]
    tokenizer = K3Tokenizer.load(data.tokenizer_file)
    assert tokenizer.vocab_size == 1024
    text = tokenizer.decode(data.tokens(0).tolist())
    assert any(text[:40] in path.read_text() for path in corpus.rglob("*.py") if path.is_file()
               and b"\xe9" not in path.read_bytes())  # fmt: skip

    again = run_curate(config_for(corpus, tmp_path / "one"), say=lines.append)
    assert again.reused
    with pytest.raises(DataError, match="another configuration"):
        run_curate(config_for(corpus, tmp_path / "one", seed=5), say=lines.append)


def test_a_task_that_cannot_write_is_a_typed_error(
    ray_local: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder for cleaned parts is taken by a file: the worker's own error reaches us."""
    out = tmp_path / "out"

    def say(line: str) -> None:
        if line.startswith("read and clean"):
            (out / ".work").mkdir(exist_ok=True)
            (out / ".work" / "clean").touch()

    with pytest.raises(DataError, match="cannot write"):
        run_curate(config_for(corpus, out), say=say)
    assert not (out / "manifest.json").exists()
    assert not (out / ".work").exists()


def test_nothing_survives_the_filters(ray_local: Path, corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no training document is left"):
        run_curate(config_for(corpus, tmp_path / "out", min_chars=10**9), say=lambda _: None)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_empty_source(ray_local: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="matches no readable file"):
        run_curate(config_for(tmp_path / "none", tmp_path / "out"), say=lambda _: None)
