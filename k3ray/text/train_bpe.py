"""Training the byte-level BPE on a sample of text.

The merges depend on the multiset of texts only, not on their order or the number of threads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from k3ray.errors import ConfigError
from k3ray.text.pre_tokenizer import PATTERN, cut_long
from k3ray.text.special_tokens import NUM_SPECIAL, special_base
from k3ray.text.tokenizer import K3Tokenizer


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> K3Tokenizer:
    """A tokenizer of exactly `vocab_size` ids; what the texts cannot fill stays reserved.

    Args:
        texts: The sample.
        vocab_size: 256 bytes + merges + 256 special slots.

    Raises:
        ConfigError: `vocab_size` leaves no room for bytes and special slots.
    """
    if special_base(vocab_size) < 256:
        raise ConfigError(
            f"vocab_size {vocab_size} is below {256 + NUM_SPECIAL} = 256 bytes + special slots",
            remedy=f"use vocab_size >= {256 + NUM_SPECIAL}", violations=["vocab_size"],
        )  # fmt: skip
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PATTERN), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=special_base(vocab_size),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator((piece for text in texts for piece in cut_long(text)), trainer)
    merges = json.loads(core.to_str())["model"]["merges"]
    return K3Tokenizer.from_merges([(left, right) for left, right in merges], vocab_size=vocab_size)
