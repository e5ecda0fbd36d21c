from __future__ import annotations

import pytest
import torch

from k3ray.config.presets import PRESETS
from k3ray.model.batch import PackedBatch
from k3ray.model.init import init_dense, init_expert
from k3ray.model.k3 import K3Model
from k3ray.model.serve_state import SeqSpan, ServeState
from tests.support.local_experts import PlainExperts
from tests.support.parity_model import CFG, make_model, make_tokens, pack


def span(slot: int, pages: tuple[int, ...], start: int, length: int) -> SeqSpan:
    return SeqSpan(slot=slot, pages=pages, start=start, length=length)


def test_parameters_of_the_release_add_up() -> None:
    cfg = PRESETS["kimi-k3"].text_config
    model = K3Model(cfg, device="meta", dtype=torch.bfloat16)
    tensors = model.state_dict()
    total = sum(t.numel() for t in tensors.values())
    assert total == 2_779_484_476_000 - 92 * 896 * 33_030_144
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (33792, 7168)
    assert shapes["model.layers.1.self_attn.q_conv1d.weight"] == (12288, 1, 4)
    assert shapes["model.layers.92.self_attn.kv_a_proj_with_mqa.weight"] == (576, 7168)
    assert shapes["model.layers.92.mlp_res_proj.weight"] == (1, 7168)
    assert shapes["model.layers.5.block_sparse_moe.gate.e_score_correction_bias"] == (896,)
    wide = {name.rsplit(".", 1)[-1] for name, t in tensors.items() if t.dtype == torch.float32}
    assert wide == {"A_log", "dt_bias", "e_score_correction_bias", "weight"}
    assert tensors["model.layers.1.block_sparse_moe.gate.weight"].dtype == torch.bfloat16


def test_fresh_weights_depend_on_seed_and_name_only() -> None:
    one, two, other = (K3Model(CFG) for _ in range(3))
    init_dense(one, 7)
    torch.randn(100)
    init_dense(two, 7)
    init_dense(other, 8)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name])
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(one.state_dict()[name], other.state_dict()[name])
    assert float(one.state_dict()[name].std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(init_expert(CFG, 1, 3, 7).w2_LF, init_expert(CFG, 1, 3, 7).w2_LF)
    assert not torch.equal(init_expert(CFG, 1, 3, 7).w1_FL, init_expert(CFG, 2, 3, 7).w1_FL)


def test_fresh_decay_biases_give_mild_decays() -> None:
    model = K3Model(CFG)
    init_dense(model, 0)
    tensors = model.state_dict()
    step = torch.nn.functional.softplus(tensors["model.layers.0.self_attn.dt_bias"])
    assert 9e-4 < float(step.min()) < float(step.max()) < 0.11
    assert float(tensors["model.layers.0.self_attn.A_log"].abs().max()) == 0.0
    assert float(tensors["model.norm.weight"].min()) == 1.0


def test_mixed_batch_equals_each_sequence_alone() -> None:
    model, experts = make_model()
    tokens = make_tokens(300)
    lengths, starts = (100, 1, 30, 1), (0, 64, 70, 129)
    pages = ((4, 9), (1, 3), (0, 2), (5, 6, 7))

    def prefilled() -> ServeState:
        state = ServeState(CFG, num_slots=5, num_pages=12)
        for slot, (start, own) in enumerate(zip(starts, pages, strict=True)):
            if start:
                first = tokens[slot : slot + start]
                model.forward_serve(first, [span(slot, own, 0, start)], state, experts)
        return state

    parts = [tokens[200 + i : 200 + i + n] for i, n in enumerate(lengths)]
    spans = [span(i, pages[i], starts[i], n) for i, n in enumerate(lengths)]
    together_state, alone_state = prefilled(), prefilled()
    together = model.forward_serve(torch.cat(parts), spans, together_state, experts)
    for index, own in enumerate(spans):
        alone = model.forward_serve(parts[index], [own], alone_state, experts)
        torch.testing.assert_close(together[index], alone[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        together_state.recurrent_ANHKV, alone_state.recurrent_ANHKV, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(
        together_state.conv_ANWC[:, 4], torch.zeros_like(alone_state.conv_ANWC[:, 4])
    )


def test_snapshot_brings_a_sequence_back() -> None:
    model, experts = make_model()
    tokens = make_tokens(80)
    state = ServeState(CFG, num_slots=2, num_pages=2)
    model.forward_serve(tokens[:70], [span(0, (0, 1), 0, 70)], state, experts)
    kept = state.snapshot(0)
    first = model.forward_serve(tokens[70:71], [span(0, (0, 1), 70, 1)], state, experts)
    state.restore(1, kept)
    again = model.forward_serve(tokens[70:71], [span(1, (0, 1), 70, 1)], state, experts)
    assert torch.equal(first, again)


def test_nobodys_nan_is_read() -> None:
    model, experts = make_model()
    tokens = make_tokens(70)
    state = ServeState(CFG, num_slots=3, num_pages=5)
    spans = [span(1, (3, 4), 0, 69), span(2, (2,), 0, 1)]
    clean = model.forward_serve(tokens, spans, state, experts)
    state = ServeState(CFG, num_slots=3, num_pages=5)
    state.latents_MGSC[:, :2].fill_(torch.nan)
    state.recurrent_ANHKV[:, 0].fill_(torch.nan)
    assert torch.equal(model.forward_serve(tokens, spans, state, experts), clean)
    state.reset_slot(0)
    state.reset_pages((0, 1))
    assert state.latents_MGSC.isfinite().all()
    assert state.recurrent_ANHKV.isfinite().all()


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        ([], "at least one span"),
        ([span(0, (0,), 0, 2)], "against 3"),
        ([span(0, (0,), 0, 2), span(0, (1,), 0, 1)], "distinct"),
        ([span(0, (0,), 62, 3)], "hold 64 tokens, 65 needed"),
    ],
)
def test_spans_must_fit(spans: list[SeqSpan], match: str) -> None:
    model, experts = make_model()
    state = ServeState(CFG, num_slots=2, num_pages=2)
    with pytest.raises(ValueError, match=match):
        model.forward_serve(make_tokens(3), spans, state, experts)


def test_borders_must_end_at_the_last_token() -> None:
    model, experts = make_model()
    with pytest.raises(ValueError, match="cu_seqlens"):
        model.forward_hidden(PackedBatch(tokens_T=make_tokens(5), cu_seqlens=(0, 4)), experts)


def test_bfloat16_model_runs_both_ways() -> None:
    model = K3Model(CFG, dtype=torch.bfloat16)
    init_dense(model, 0)
    experts = PlainExperts(CFG, 0)
    tokens = make_tokens(20)
    logits = model.logits(model.forward_hidden(pack((20,), tokens), experts))
    logits.logsumexp(-1).sum().backward()
    assert logits.dtype == torch.float32
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)
    state = ServeState(CFG, num_slots=1, num_pages=1, dtype=torch.bfloat16)
    served = model.forward_serve(tokens, [span(0, (0,), 0, 20)], state, experts, all_rows=True)
    torch.testing.assert_close(served, logits.detach(), rtol=0.1, atol=0.02)


def test_only_the_first_attention_mix_gets_no_gradient() -> None:
    model, experts = make_model()
    model.logits(model.forward_hidden(pack((9,), make_tokens(9)), experts)).sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {
        "model.layers.0.self_attention_res_norm.weight",
        "model.layers.0.self_attention_res_proj.weight",
    }
