"""Where K3's special tokens lie: always the last 256 ids of the vocabulary, in the release's order.

The release has 163,584 base ranks and 256 special slots. A smaller vocabulary keeps every slot's
distance from its own base, so `[EOS]` is `base + 1` everywhere. Slots without a name, and base ids
that a small corpus left without a merge, are called `<|reserved_token_{id}|>`.
"""

from __future__ import annotations

from typing import Final

NUM_SPECIAL: Final = 256

BOS: Final = "[BOS]"
EOS: Final = "[EOS]"
END_OF_MSG: Final = "<|end_of_msg|>"
OPEN: Final = "<|open|>"
CLOSE: Final = "<|close|>"
SEP: Final = "<|sep|>"
UNK: Final = "[UNK]"
PAD: Final = "[PAD]"

SPECIAL_OFFSETS: Final[dict[str, int]] = {
    BOS: 0, EOS: 1, END_OF_MSG: 2, OPEN: 3, CLOSE: 4, SEP: 5,
    "[start_header_id]": 6, "[end_header_id]": 7, "[EOT]": 9,
    "<|media_begin|>": 18, "<|media_content|>": 19, "<|media_end|>": 20, "<|media_pad|>": 21,
    "<osagent_mode>": 65, UNK: 254, PAD: 255,
}  # fmt: skip
"""Distance of each named special token from the base. Source: tokenizer_config of the release."""


def special_base(vocab_size: int) -> int:
    """The id of `[BOS]`, which is the number of ids before the special slots."""
    return vocab_size - NUM_SPECIAL


def token_names_from(first: int, vocab_size: int) -> list[str]:
    """Names of the ids `first .. vocab_size - 1`, none of which stands for text.

    >>> token_names_from(256, 512)[:3]
    ['[BOS]', '[EOS]', '<|end_of_msg|>']
    >>> token_names_from(254, 512)[:3]
    ['<|reserved_token_254|>', '<|reserved_token_255|>', '[BOS]']
    """
    base = special_base(vocab_size)
    named = {base + offset: name for name, offset in SPECIAL_OFFSETS.items()}
    return [named.get(token, f"<|reserved_token_{token}|>") for token in range(first, vocab_size)]
