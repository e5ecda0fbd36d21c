"""`tiktoken.model`: ids by rank, the merging of the format's definition, bad files."""

from __future__ import annotations

import base64
import json
import pickle
import random
import string
from itertools import pairwise
from pathlib import Path

import pytest
import regex

from k3ray.config.resolve import resolve_tokenizer
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import BadRequestError, ConfigError, DataError
from k3ray.serve.deployment import load_tokenizer
from k3ray.text.chat import ChatMessage
from k3ray.text.pre_tokenizer import PATTERN
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.text.train_bpe import train_bpe
from k3ray.text.xtml import render_chat

SAMPLE = Path(json.__file__).read_text(encoding="utf-8")


def _tokens() -> list[bytes]:
    """Byte tokens in an order of their own, then merges; some are reached by several pairs."""
    trained = train_bpe([SAMPLE, "aaaa aaaaa aaaaaaa " * 30], vocab_size=900)
    learnt = [trained.token_bytes(token) for token in range(256, trained.num_text_tokens)]
    single = [bytes([value]) for value in range(256)]
    random.Random(4).shuffle(single)
    return single + learnt


TOKENS = _tokens()
RANKS = {token: rank for rank, token in enumerate(TOKENS)}


def _document(tokens: list[bytes]) -> str:
    return "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("release") / "tiktoken.model"
    path.write_text(_document(TOKENS))
    return path


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> K3Tokenizer:
    return K3Tokenizer.load(file)


def _by_definition(text: str) -> list[int]:
    """Merge the adjacent pair of the lowest rank, the leftmost of equals, until there is none."""
    ids: list[int] = []
    for piece in regex.findall(PATTERN, text, regex.V1):
        parts = [bytes([value]) for value in piece.encode()]
        while True:
            pairs = [(RANKS.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
            found = [pair for pair in pairs if pair[0] is not None]
            if not found:
                break
            at = min(found)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [RANKS[part] for part in parts]
    return ids


def test_equal_to_the_definition(tokenizer: K3Tokenizer) -> None:
    random_ = random.Random(7)
    alphabet = string.printable + "éß你好世界\U0001f3f3\u200d\u0301Ǆʰ"
    texts = [SAMPLE[:3000], "a" * 97, " " * 33, "World's IT'S 12345\r\n\n x", ""]
    texts += ["".join(random_.choices(alphabet, k=random_.randrange(80))) for _ in range(300)]
    texts += ["".join(random_.choices("a  \n", k=random_.randrange(40))) for _ in range(200)]
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == _by_definition(text), repr(text)
        assert tokenizer.decode(ids) == text


def test_special_slots_follow_the_ranks_and_no_text_reaches_them(tokenizer: K3Tokenizer) -> None:
    assert tokenizer.num_text_tokens == len(TOKENS)
    assert tokenizer.vocab_size == len(TOKENS) + 256
    assert tokenizer.special("[BOS]") == len(TOKENS)
    assert tokenizer.end_of_msg_id == len(TOKENS) + 2
    for name in ("<|open|>", "<|end_of_msg|>", "[EOS]", "<|reserved_token_1000|>"):
        assert max(tokenizer.encode(f"a {name} b")) < len(TOKENS)
    with pytest.raises(BadRequestError, match="surrogate"):
        tokenizer.encode("\ud800")


def test_a_chat_is_rendered_and_the_tokenizer_travels(tokenizer: K3Tokenizer) -> None:
    again = pickle.loads(pickle.dumps(tokenizer))
    messages = [ChatMessage(role="user", content=("<|close|> hi",))]
    prompts = [render_chat(messages, tokenizer=each) for each in (tokenizer, again)]
    assert prompts[0] == prompts[1]
    assert again.digest == tokenizer.digest


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: [*lines[:9], lines[9].replace(" 9", " x"), *lines[10:]], "line 10"),
        (lambda lines: [*lines[:9], "%%% 9", *lines[10:]], "line 10"),
        (lambda lines: [*lines, lines[0]], "rank 0 is there twice"),
        (lambda lines: lines[:400] + lines[401:], "the ranks are not"),
        (lambda lines: [*lines, f"{lines[300].split()[0]} {len(lines)}"], "there twice"),
        (lambda lines: [*lines, f" {len(lines)}"], "no base64 token and rank"),
        (lambda lines: [f"{t.split()[0]} {i}" for i, t in enumerate(lines[5:])], "5 of the 256"),
        (lambda lines: [], "256 of the 256"),
    ],
    ids=["rank", "base64", "rank-twice", "gap", "token-twice", "no-token", "bytes", "empty"],
)
def test_a_damaged_file_is_refused(change, problem, tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text("\n".join(change(_document(TOKENS).splitlines())))
    with pytest.raises(DataError, match=problem):
        K3Tokenizer.load(path)


def test_a_checkpoint_brings_its_tokenizer(file: Path, tmp_path: Path) -> None:
    inside = SupernodeSpec(checkpoint=str(file.parent))
    assert resolve_tokenizer(inside) == str(file)
    assert resolve_tokenizer(SupernodeSpec(checkpoint=str(tmp_path))) is None
    own = SupernodeSpec(checkpoint=str(file.parent), tokenizer_file="other.json")
    assert resolve_tokenizer(own) == "other.json"
    assert resolve_tokenizer(SupernodeSpec()) is None


def test_a_tokenizer_that_the_model_has_no_ids_for_is_refused(file: Path) -> None:
    assert load_tokenizer(str(file), len(TOKENS) + 256).vocab_size == len(TOKENS) + 256
    with pytest.raises(ConfigError, match="ids, the model"):
        load_tokenizer(str(file), len(TOKENS) + 255)
