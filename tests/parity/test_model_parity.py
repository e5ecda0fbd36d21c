from __future__ import annotations

import pytest
import torch

from k3ray.config.numeric import NumericMode
from tests.support.parity_model import (
    PACKED_LENGTHS,
    checkpointed_rows,
    make_model,
    make_tokens,
    mla_rows,
    pack,
    packed_rows,
    reference_rows,
    split_rows,
)
from tests.support.parity_ops import Row


def check(rows: list[Row]) -> None:
    for row in rows:
        print(f"{row.case}: {row.what}: {row.error:.1e} (bound {row.bound:.0e})")
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("numeric", NumericMode)
def test_whole_model_equals_reference(dtype: torch.dtype, numeric: NumericMode) -> None:
    check(reference_rows(dtype, numeric=numeric))


@pytest.mark.parametrize("numeric", NumericMode)
def test_prefill_and_decode_equal_full_forward_at_every_split(numeric: NumericMode) -> None:
    check(split_rows(numeric=numeric))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_absorbed_mla_equals_expanded(dtype: torch.dtype) -> None:
    check(mla_rows(dtype))


def test_packed_equals_separate_documents() -> None:
    check(packed_rows())


def test_checkpointed_equals_kept_activations() -> None:
    check(checkpointed_rows())


def test_checkpointing_runs_every_expert_layer_again() -> None:
    model, experts = make_model(checkpointed=True)
    batch = pack((20,), make_tokens(20))
    hidden = model.forward_hidden(batch, experts)
    first = experts.num_forwards
    hidden.sum().backward()
    assert experts.num_forwards == 2 * first


@pytest.mark.parametrize("changed", range(len(PACKED_LENGTHS)))
def test_last_token_of_a_document_changes_nothing_in_the_others(changed: int) -> None:
    model, experts = make_model()
    tokens = make_tokens(sum(PACKED_LENGTHS))
    batch = pack(PACKED_LENGTHS, tokens)
    other = tokens.clone()
    last = batch.cu_seqlens[changed + 1] - 1
    other[last] = (other[last] + 1) % 512
    with torch.no_grad():
        before = model.forward_hidden(batch, experts)
        after = model.forward_hidden(pack(PACKED_LENGTHS, other), experts)
    assert not torch.equal(before[last], after[last])
    rows = torch.arange(len(tokens)) != last
    assert torch.equal(before[rows], after[rows])
