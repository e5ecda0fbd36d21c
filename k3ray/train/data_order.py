"""Which sequence is read when: a pure function of seed and global position.

`sample(step, micro_batch, i) = permute(seed, epoch)[position]`, whatever the number of workers,
restarts or attempts; the cursor of a step is all that a ledger has to keep.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from k3ray.errors import DataError
from k3ray.model.batch import PackedBatch
from k3ray.train.loss import IGNORED


class SequenceSource(Protocol):
    """What is read of a data set (`model.packed_data.PackedDataset`)."""

    @property
    def num_sequences(self) -> int:
        """How many there are."""
        ...

    def tokens(self, index: int) -> npt.NDArray[np.int32]:
        """Token ids of one packed sequence."""
        ...

    def cu_seqlens(self, index: int) -> tuple[int, ...]:
        """Document borders within the sequence, 0 first and its length last."""
        ...


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """The order of one epoch: a permutation of `size`, by Philox keyed with (seed, epoch)."""
    order = np.random.Generator(np.random.Philox(key=[seed, epoch])).permutation(size)
    order.setflags(write=False)
    return order


def sequence_at(position: int, *, seed: int, size: int) -> int:
    """The sequence at global `position` (from 0) of an endless stream of epochs."""
    epoch, offset = divmod(position, size)
    return int(permutation(seed, epoch, size)[offset])


@dataclass(frozen=True, slots=True, kw_only=True)
class DataOrder:
    """Batches of a run.

    Args:
        source: Packed sequences.
        seed: Seed of the order.
        micro_batches: Micro-batches per step.
        sequences: Sequences per micro-batch.
    """

    source: SequenceSource
    seed: int
    micro_batches: int
    sequences: int

    def cursor(self, step: int) -> tuple[int, int]:
        """Global positions [start, stop) of optimizer step `step` (from 1)."""
        per_step = self.micro_batches * self.sequences
        return (step - 1) * per_step, step * per_step

    def indices(self, step: int) -> tuple[int, ...]:
        """The sequences of a step, in reading order.

        Raises:
            DataError: the data set is empty.
        """
        size = self.source.num_sequences
        if size == 0:
            raise DataError(
                "the training data has no sequence", remedy="run pipelines.curate with more input"
            )
        start, stop = self.cursor(step)
        return tuple(sequence_at(p, seed=self.seed, size=size) for p in range(start, stop))

    def micro_batch(self, step: int, index: int) -> PackedBatch:
        """Micro-batch `index` of a step, with targets."""
        first = index * self.sequences
        return pack(self.source, self.indices(step)[first : first + self.sequences])

    def digest(self, step: int) -> str:
        """Digest of the sequences that a step reads; part of its commit record."""
        return hashlib.blake2b(np.array(self.indices(step)).tobytes(), digest_size=8).hexdigest()


def pack(source: SequenceSource, indices: tuple[int, ...]) -> PackedBatch:
    """Sequences side by side as one batch; no target crosses a document's end."""
    tokens, borders, targets = [], [0], []
    for index in indices:
        sequence = source.tokens(index).astype(np.int64)
        ends = source.cu_seqlens(index)[1:]
        following = np.concatenate([sequence[1:], [IGNORED]])
        following[np.array(ends) - 1] = IGNORED
        first = borders[-1]
        borders += [first + end for end in ends]
        tokens.append(sequence)
        targets.append(following)
    return PackedBatch(
        tokens_T=torch.from_numpy(np.concatenate(tokens)),
        cu_seqlens=tuple(borders),
        targets_T=torch.from_numpy(np.concatenate(targets)),
    )
