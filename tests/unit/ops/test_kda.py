from __future__ import annotations

import pytest
import torch

from k3ray.ops.kda import kda_chunkwise, kda_gate, kda_recurrent
from k3ray.ops.kda_pairs import chunk_pairs
from k3ray.ops.ragged import build_layout


def operands(tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    unit = torch.nn.functional.normalize
    q, k = (unit(torch.randn(tokens, 2, 8, dtype=dtype), dim=-1) for _ in range(2))
    v = torch.randn(tokens, 2, 6, dtype=dtype)
    g = -5 * torch.rand(tokens, 2, 8, dtype=dtype)
    return [q, k, v, g, torch.rand(tokens, 2, dtype=dtype)]


def test_chunk_pairs_are_the_defined_sums() -> None:
    q, k, g = (torch.randn(3, 16, 4, dtype=torch.float64) for _ in range(3))
    g = -g.abs()
    kk, qk, prefix, suffix = chunk_pairs(q, k, g)
    total = g.cumsum(1)
    decays = (total[:, :, None] - total[:, None]).exp()
    torch.testing.assert_close(kk, torch.einsum("nic,njc,nijc->nij", k, k, decays).tril(-1))
    torch.testing.assert_close(qk, torch.einsum("nic,njc,nijc->nij", q, k, decays).tril())
    torch.testing.assert_close(prefix, total)
    torch.testing.assert_close(suffix, total[:, -1:] - total)


def test_chunk_pairs_gradients() -> None:
    q, k, g = (
        (sign * torch.rand(1, 8, 2, dtype=torch.float64)).requires_grad_() for sign in (1, 1, -1)
    )
    assert torch.autograd.gradcheck(chunk_pairs, (q, k, g))


@pytest.mark.parametrize("split", [1, 63, 64, 65, 100])
def test_state_carries_over_any_split(split: int) -> None:
    base = operands(130)
    whole, last = kda_chunkwise(*base, layout=build_layout((0, 130)))
    left, state = kda_chunkwise(*(x[:split] for x in base), layout=build_layout((0, split)))
    right, after = kda_chunkwise(
        *(x[split:] for x in base), layout=build_layout((0, 130 - split)), state_DHKV=state
    )
    torch.testing.assert_close(torch.cat((left, right)), whole)
    torch.testing.assert_close(after, last)


def test_states_come_back_in_the_order_of_the_documents() -> None:
    base = operands(70 + 3 + 200)
    start = torch.randn(3, 2, 8, 6, dtype=torch.float64)
    out, states = kda_chunkwise(*base, layout=build_layout((0, 70, 73, 273)), state_DHKV=start)
    for doc, (a, b) in enumerate(((0, 70), (70, 73), (73, 273))):
        alone, state = kda_chunkwise(
            *(x[a:b] for x in base),
            layout=build_layout((0, b - a)),
            state_DHKV=start[doc : doc + 1],
        )
        torch.testing.assert_close(out[a:b], alone)
        torch.testing.assert_close(states[doc], state[0])


def test_one_recurrent_step_equals_one_chunk_row() -> None:
    base = operands(1)
    start = torch.randn(1, 2, 8, 6, dtype=torch.float64)
    out, state = kda_recurrent(*base, state_SHKV=start)
    chunked, after = kda_chunkwise(*base, layout=build_layout((0, 1)), state_DHKV=start)
    torch.testing.assert_close(out, chunked)
    torch.testing.assert_close(state, after)


def test_a_document_never_reads_another_ones_nan() -> None:
    base = operands(140, torch.float32)
    for x in base:
        x[:70] = torch.nan
    out, states = kda_chunkwise(*base, layout=build_layout((0, 70, 140)))
    assert out[70:].isfinite().all()
    assert states[1].isfinite().all()


def test_gate_stays_within_its_bound() -> None:
    z = torch.tensor([-1e4, -50.0, 0.0, 50.0, 1e4]).view(5, 1, 1)
    g = kda_gate(z, torch.zeros(1), lower_bound=-5.0)
    assert g.flatten().tolist() == pytest.approx([0.0, 0.0, -2.5, -5.0, -5.0])


def test_layout_must_match_the_tokens() -> None:
    with pytest.raises(ValueError, match="layout"):
        kda_chunkwise(*operands(5), layout=build_layout((0, 6)))
