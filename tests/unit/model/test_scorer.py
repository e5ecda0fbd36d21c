"""Scoring a checkpoint, and the way from a checkpoint into the store and out again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from k3ray.cli.main import main
from k3ray.config.model import VisionConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.config.presets import PRESETS
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import BadRequestError, ConfigError, ContextLengthError, StoreError
from k3ray.model.checkpoint_codec import random_source, read_dense, read_expert
from k3ray.model.scorer import CheckpointScorer
from k3ray.model.store_export import export_version, import_checkpoint
from k3ray.ops.logprobs import token_logprobs
from k3ray.weights.checkpoint import Checkpoint
from k3ray.weights.checkpoint_writer import write_checkpoint
from k3ray.weights.store import WeightStore

TINY = PRESETS["k3-tiny"]
TOKENS = [(7 * i * i + 3) % 400 for i in range(150)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def write(out: Path, experts: ExpertFormat) -> Path:
    write_checkpoint(out, TINY, experts, random_source(TINY, 3))
    return out


@pytest.mark.parametrize("experts", ExpertFormat)
def test_out_of_a_checkpoint_into_the_store_and_out_again(
    experts: ExpertFormat, tmp_path: Path
) -> None:
    first = write(tmp_path / "first", experts)
    store = WeightStore(tmp_path / "store")
    version = import_checkpoint(store, first, line="main")
    done = export_version(
        store, tmp_path / "second", line="main", version=str(version), model=TINY, experts=experts
    )
    assert done == version
    one, two = Checkpoint.open(first), Checkpoint.open(tmp_path / "second")
    ones, twos = read_dense(one), read_dense(two)
    assert all(torch.equal(ones[name], twos[name]) for name in ones)
    for name, tensor in read_expert(one, 2, 5).items():
        assert torch.equal(tensor, read_expert(two, 2, 5)[name])
    logits = CheckpointScorer(first).logits(TOKENS)
    assert logits.shape == (len(TOKENS), TINY.text_config.vocab_size)
    assert torch.equal(logits, CheckpointScorer(tmp_path / "second").logits(TOKENS))


def test_every_tensor_matters(tmp_path: Path) -> None:
    """Random weights are far enough from neutral that each kind of tensor moves the logits."""
    scorer = CheckpointScorer(write(tmp_path / "checkpoint", ExpertFormat.FP32))
    golden = scorer.logits(TOKENS[:70])
    executed = [
        (name, tensor)
        for name, tensor in scorer.model.state_dict().items()
        if not name.startswith("model.layers.0.self_attention_res")  # its bank is empty
    ]
    for name, tensor in executed:
        kept = tensor.clone()
        tensor.copy_(torch.ones_like(tensor) if name.endswith("norm.weight") else tensor * 0)
        moved = (scorer.logits(TOKENS[:70]) - golden).abs().max()
        tensor.copy_(kept)
        assert moved > 1e-4, name


def test_bad_tokens_are_refused(tmp_path: Path) -> None:
    scorer = CheckpointScorer(write(tmp_path / "checkpoint", ExpertFormat.BF16))
    for tokens, word in (([], "no token"), ([1, 512], "not in"), ([-1], "not in")):
        with pytest.raises(BadRequestError, match=word):
            scorer.logits(tokens)
    image = 512 - (163840 - 163605)
    assert scorer.logits([1, image]).shape == (2, 512), (
        "a model without a vision tower has no image"
    )
    with pytest.raises(ContextLengthError):
        scorer.logits([1] * (TINY.text_config.max_position_embeddings + 1))


def test_images_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vision = VisionConfig(
        vt_hidden_size=32, vt_num_hidden_layers=1, vt_num_attention_heads=2, qkv_hidden_size=32,
        vt_intermediate_size=64, mm_hidden_size=32, text_hidden_size=TINY.text_config.hidden_size,
    )  # fmt: skip
    seeing = TINY.model_copy(update={"vision_config": vision})
    folder = tmp_path / "checkpoint"
    write_checkpoint(folder, seeing, ExpertFormat.BF16, random_source(seeing, 3))
    with pytest.raises(BadRequestError, match="image"):
        CheckpointScorer(folder).logits([1, 512 - (163840 - 163605)])
    command = ["score", "--checkpoint", str(folder), "--token-ids", "1", "--image", "x.png"]
    assert main(command) == 2
    assert "not computed yet" in capsys.readouterr().err


def test_the_command_prints_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "checkpoint", ExpertFormat.MXFP4)
    with pytest.raises(SystemExit):
        main(["score", "--checkpoint", str(folder), "--token-ids", "1,2,3", "--json", "--logits"])
    document = json.loads(capsys.readouterr().out)
    assert len(document["logprobs"]) == 2
    assert document["logits"] == CheckpointScorer(folder).logits([1, 2, 3]).tolist()


def test_a_long_file_of_tokens_is_scored_in_pieces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, long = write(tmp_path / "checkpoint", ExpertFormat.FP32), TOKENS * 4
    file = tmp_path / "tokens.txt"
    file.write_text(",".join(map(str, long)))
    with pytest.raises(SystemExit):
        main(["score", "--checkpoint", str(folder), "--token-file", str(file), "--json"])
    document = json.loads(capsys.readouterr().out)
    logits = CheckpointScorer(folder).logits(long)
    expected = token_logprobs(logits[:-1].numpy(), np.array(long[1:]))
    assert document["logprobs"] == expected.tolist()
    assert document["next_token"] == int(logits[-1].argmax())
    for options in ([], ["--token-ids", "1", "--token-file", str(file)], ["--token-file", "none"]):
        assert main(["score", "--checkpoint", str(folder), *options]) == 2


def test_another_model_is_not_exported(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "store")
    out = tmp_path / "out"
    wanted = {"line": "main", "version": None, "experts": ExpertFormat.BF16}
    with pytest.raises(StoreError, match="no published version"):
        export_version(store, out, model=TINY, **wanted)
    import_checkpoint(store, write(tmp_path / "checkpoint", ExpertFormat.BF16), line="main")
    with pytest.raises(StoreError, match="another model"):
        export_version(store, out, model=PRESETS["k3-nano"], **wanted)


def test_a_checkpoint_brings_its_own_model() -> None:
    with pytest.raises(ValueError, match="brings its own model"):
        SupernodeSpec(checkpoint="a", model_config_file="b")


def test_sides_that_are_no_multiple_of_32_cannot_be_packed(tmp_path: Path) -> None:
    odd = TINY.text_config.model_copy(update={"moe_intermediate_size": 48})
    model = TINY.model_copy(update={"text_config": odd})
    with pytest.raises(ConfigError, match="32"):
        write_checkpoint(tmp_path / "out", model, ExpertFormat.MXFP4, random_source(model, 0))
    assert list(tmp_path.iterdir()) == []
