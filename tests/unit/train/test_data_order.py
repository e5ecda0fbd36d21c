"""Data order: a pure function of seed and position; packing; the schedule."""

import numpy as np
import pytest

from k3ray.errors import DataError
from k3ray.train.data_order import DataOrder, pack, sequence_at
from k3ray.train.loss import IGNORED, num_targets
from tests.support.toy_text import ToyText


def _order(source=None, **changes):
    fields = {"seed": 3, "micro_batches": 2, "sequences": 3, **changes}
    return DataOrder(source=source or ToyText(num_sequences=10), **fields)


def test_every_epoch_reads_every_sequence_once_in_another_order():
    first = [sequence_at(p, seed=1, size=10) for p in range(10)]
    second = [sequence_at(p, seed=1, size=10) for p in range(10, 20)]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != [sequence_at(p, seed=2, size=10) for p in range(10)]


def test_a_position_means_the_same_however_steps_are_cut():
    fine = _order(micro_batches=1, sequences=2)
    coarse = _order(micro_batches=2, sequences=3)
    flat = [i for step in range(1, 10) for i in fine.indices(step)]
    assert [i for step in range(1, 4) for i in coarse.indices(step)] == flat
    assert coarse.cursor(3) == (12, 18)
    assert coarse.digest(1) != coarse.digest(2)
    assert coarse.digest(2) == _order().digest(2)


def test_targets_never_cross_a_documents_end():
    source = ToyText(num_sequences=4, sequence_length=12, borders=(0, 5, 12))
    batch = pack(source, (2, 0))
    assert batch.cu_seqlens == (0, 5, 12, 17, 24)
    tokens, targets = batch.tokens_T.numpy(), batch.targets_T.numpy()
    ends = np.array(batch.cu_seqlens[1:]) - 1
    assert (targets[ends] == IGNORED).all()
    inside = np.setdiff1d(np.arange(24), ends)
    assert (targets[inside] == tokens[inside + 1]).all()
    assert num_targets(batch.targets_T) == 20


def test_an_empty_data_set_is_a_typed_error():
    with pytest.raises(DataError, match="no sequence"):
        _order(ToyText(num_sequences=0)).indices(1)
