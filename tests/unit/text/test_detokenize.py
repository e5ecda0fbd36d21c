"""Incremental detokenising and stop strings: concatenated deltas equal the whole."""

from __future__ import annotations

import pytest

from k3ray.text.detokenize import IncrementalDetokenizer
from k3ray.text.stop_strings import StopMatcher
from k3ray.text.tokenizer import K3Tokenizer

TOKENIZER = K3Tokenizer.byte_level()
S05 = "A \u4e16a\u0301b \U0001f3f3\ufe0f\u200d\U0001f308 x"


def deltas(tokens: list[int], *, skip_special: bool = True) -> list[str]:
    stream = IncrementalDetokenizer(TOKENIZER, skip_special=skip_special)
    return [*(stream.feed((token,)) for token in tokens), stream.finish()]


def test_one_id_per_step_resends_nothing() -> None:
    sent = deltas(TOKENIZER.encode(S05))
    assert "".join(sent) == S05
    assert all("\ufffd" not in delta for delta in sent)
    assert all(len(delta) <= 1 for delta in sent)


@pytest.mark.parametrize(
    "raw", [b"\xff", b"\xe4\xb8", b"ok\xe4", b"\xc3(", b"\xf0\x9f\xf0\x9f\x8c\x88"]
)
def test_broken_bytes_become_the_same_replacement_characters(raw: bytes) -> None:
    assert "".join(deltas(list(raw))) == TOKENIZER.decode(list(raw))


@pytest.mark.parametrize("skip_special", [True, False])
def test_special_tokens(skip_special: bool) -> None:
    tokens = [*b"a", TOKENIZER.eos_id, *"\u4e16".encode(), TOKENIZER.end_of_msg_id]
    whole = TOKENIZER.decode(tokens, skip_special=skip_special)
    assert "".join(deltas(tokens, skip_special=skip_special)) == whole
    assert whole == ("a\u4e16" if skip_special else "a[EOS]\u4e16<|end_of_msg|>")


@pytest.mark.parametrize(
    ("text", "stops", "sent", "matched"),
    [
        ("hello world", ["o w"], "hell", "o w"),
        ("abz", ["abc", "bz"], "a", "bz"),
        ("abab", ["abc"], "abab", None),
        ("xaab", ["aab"], "x", "aab"),
        ("aaab", ["aab"], "a", "aab"),
        ("END", ["ND", "END"], "", "END"),
        ("no stops", [], "no stops", None),
        ("empty", [""], "empty", None),
        ("tail <", ["<|x|>"], "tail <", None),
    ],
)
def test_stop_matcher_at_every_cut(
    text: str, stops: list[str], sent: str, matched: str | None
) -> None:
    for size in range(1, len(text) + 1):
        matcher = StopMatcher(stops)
        pieces = [matcher.feed(text[at : at + size]) for at in range(0, len(text), size)]
        assert "".join(pieces) + matcher.finish() == sent, size
        assert matcher.matched == matched


def test_stop_matcher_sends_as_early_as_it_can() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.feed("line\n") == "line"
    assert matcher.feed("next") == "\nnext"
