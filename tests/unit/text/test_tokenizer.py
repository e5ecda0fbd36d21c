"""K3Tokenizer: layout of ids, exact vocabulary size, round trips, bad input."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from k3ray.errors import BadRequestError, ConfigError, DataError
from k3ray.text.pre_tokenizer import MAX_RUN_CHARS, cut_long
from k3ray.text.special_tokens import SPECIAL_OFFSETS
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.train_bpe import train_bpe

SAMPLE = Path(json.__file__).read_text(encoding="utf-8")
HARD = (
    "A \u4e16a\u0301b \U0001f3f3\ufe0f\u200d\U0001f308 x\r\n\t "
    '"q" 12345 \x00 caf\u00e9 \u4f60\u597d\n'
)


@pytest.fixture(scope="module")
def trained() -> K3Tokenizer:
    return train_bpe([SAMPLE], vocab_size=700)


def test_byte_level_ids_are_the_bytes() -> None:
    tokenizer = K3Tokenizer.byte_level()
    assert tokenizer.vocab_size == 512
    assert tokenizer.encode("\u00e9A") == [0xC3, 0xA9, 0x41]
    assert tokenizer.special("[BOS]") == 256
    assert tokenizer.pad_id == 511


def test_special_slots_keep_the_releases_distances(trained: K3Tokenizer) -> None:
    release_base = 163584
    release = {
        "[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587,
        "<|close|>": 163588, "<|sep|>": 163589, "[EOT]": 163593, "<|media_pad|>": 163605,
        "<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839,
    }  # fmt: skip
    for name, token in release.items():
        assert trained.special(name) - trained.special("[BOS]") == token - release_base, name
    assert trained.special("[BOS]") == trained.vocab_size - 256


def test_small_sample_is_filled_with_reserved_ids() -> None:
    tokenizer = train_bpe(["aaaa bbbb"], vocab_size=1024)
    assert tokenizer.vocab_size == 1024
    assert tokenizer.num_text_tokens < 768
    assert tokenizer.special(f"<|reserved_token_{tokenizer.num_text_tokens}|>") > 255
    assert tokenizer.is_special(767)
    assert tokenizer.special("[BOS]") == 768


def test_merges_shorten_and_round_trip(trained: K3Tokenizer) -> None:
    assert len(trained.encode(SAMPLE)) < 0.5 * len(SAMPLE.encode())
    assert trained.decode(trained.encode(SAMPLE)) == SAMPLE
    assert trained.decode(trained.encode(HARD)) == HARD


def test_training_does_not_depend_on_order() -> None:
    texts = SAMPLE.split("\n\n")
    assert train_bpe(texts, vocab_size=640).digest == train_bpe(texts[::-1], vocab_size=640).digest


def test_save_load_pickle(trained: K3Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer" / "tokenizer.json"
    trained.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["tokenizer.json"]
    for again in (K3Tokenizer.load(path), pickle.loads(pickle.dumps(trained))):
        assert again.digest == trained.digest
        assert again.encode(SAMPLE) == trained.encode(SAMPLE)


def test_other_readers_see_the_same_ids(trained: K3Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path / "tokenizer.json")
    other = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert other.get_vocab_size() == trained.vocab_size
    assert other.encode(SAMPLE).ids == trained.encode(SAMPLE)
    for name in SPECIAL_OFFSETS:
        assert other.token_to_id(name) == trained.special(name)


def test_decode_with_and_without_special(trained: K3Tokenizer) -> None:
    tokens = [trained.special("[BOS]"), *trained.encode("hi"), trained.end_of_msg_id]
    assert trained.decode(tokens) == "hi"
    assert trained.decode(tokens, skip_special=False) == "[BOS]hi<|end_of_msg|>"


@pytest.mark.parametrize("token", [-1, 700, 10**9])
def test_ids_outside_the_vocabulary(trained: K3Tokenizer, token: int) -> None:
    with pytest.raises(BadRequestError, match="outside the vocabulary"):
        trained.decode([token])


def test_half_surrogate_is_refused(trained: K3Tokenizer) -> None:
    with pytest.raises(BadRequestError, match="surrogate pair at character 1"):
        trained.encode("a\ud800b")


@pytest.mark.parametrize("vocab_size", [1, 256, 511])
def test_vocabulary_too_small(vocab_size: int) -> None:
    with pytest.raises(ConfigError, match="vocab"):
        train_bpe(["text"], vocab_size=vocab_size)
    with pytest.raises(ConfigError, match="vocab"):
        K3Tokenizer.byte_level(vocab_size)


def test_unknown_special_name(trained: K3Tokenizer) -> None:
    with pytest.raises(ConfigError, match="no special token"):
        trained.special("<|nope|>")


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": {}}', "shifted"])
def test_damaged_files(trained: K3Tokenizer, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "tokenizer.json"
    trained.save(path)
    if damage == "shifted":
        damage = path.read_text().replace("[EOS]", "[SOE]")
    path.write_text(damage)
    with pytest.raises(DataError):
        K3Tokenizer.load(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read tokenizer"):
        K3Tokenizer.load(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["x" * 60_000, " " * 60_000, "ab " * 200_000, "x" * 25_001 + " "])
def test_long_texts_are_cut_without_loss(text: str) -> None:
    pieces = list(cut_long(text))
    assert "".join(pieces) == text
    longest_runs = [max(map(len, piece.split() or [piece])) for piece in pieces]
    assert max(longest_runs) <= MAX_RUN_CHARS
    tokenizer = K3Tokenizer.byte_level()
    assert tokenizer.decode(tokenizer.encode(text)) == text
