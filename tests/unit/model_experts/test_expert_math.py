"""Experts: forward and backward against autograd, and independence of batch and partition."""

import numpy as np
import pytest
import torch

from k3ray.config.presets import PRESETS
from k3ray.errors import PlanError, StaleVersionError
from k3ray.model import expert_math
from k3ray.model.expert_bank import ExpertBank, situ_of
from k3ray.model.expert_math import expert_backward, expert_forward, finish, group_rows
from k3ray.model.expert_stack import all_experts, init_stacks, owned_names
from k3ray.ops.activation import situ_glu

CFG = PRESETS["k3-tiny"].text_config
LAYER = CFG.moe_layers[0]
SITU = situ_of(CFG)


def _scaled(stacks):
    return {layer: stack.map(lambda t: t * 10) for layer, stack in stacks.items()}


def _pairs(num_rows, top_k, seed, experts=range(CFG.num_experts)):
    rng = np.random.default_rng(seed)
    chosen = np.stack([rng.choice(list(experts), top_k, replace=False) for _ in range(num_rows)])
    rows = np.repeat(np.arange(num_rows, dtype=np.int32), top_k)
    return rows, chosen.reshape(-1).astype(np.int32)


def _latents(num_rows, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, CFG.routed_expert_hidden_size, generator=generator)


def _reference(stack, latents_NL, rows, experts):
    w1, w2, w3 = stack.w1_EFL, stack.w2_ELF, stack.w3_EFL
    out = []
    for row, expert in zip(rows, experts, strict=True):
        x_L, slot = latents_NL[int(row)], stack.experts.index(int(expert))
        hidden_F = situ_glu(
            (w1[slot] @ x_L)[None], (w3[slot] @ x_L)[None], beta=SITU.beta,
            linear_beta=SITU.linear_beta,
        )  # fmt: skip
        out.append(w2[slot] @ hidden_F[0])
    return torch.stack(out)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 17, 100])
def test_forward_and_gradients_equal_autograd(num_rows):
    stack = _scaled(init_stacks(CFG, {LAYER: tuple(range(CFG.num_experts))}, 3))[LAYER]
    rows, experts = _pairs(num_rows, 2, seed=num_rows)
    latents = _latents(num_rows)
    got, saved = finish(expert_forward(stack, group_rows(stack, rows, experts), latents, SITU))
    leaf = stack.map(lambda t: t.clone().requires_grad_())
    latents_leaf = latents.clone().requires_grad_()
    want = _reference(leaf, latents_leaf, rows, experts)
    torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-6)

    grad_rows = _latents(len(rows), seed=9)
    want.backward(grad_rows)
    grads = stack.map(torch.zeros_like)
    dx_PL = finish(expert_backward(stack, grads, saved, grad_rows, SITU))
    dlatents = torch.zeros_like(latents).index_add_(0, torch.from_numpy(rows).long(), dx_PL)
    torch.testing.assert_close(dlatents, latents_leaf.grad, rtol=1e-4, atol=1e-5)
    for got_grad, leaf_tensor in zip(grads.tensors(), leaf.tensors(), strict=True):
        torch.testing.assert_close(got_grad, leaf_tensor.grad, rtol=1e-4, atol=1e-5)


def test_a_row_has_the_same_bits_alone_and_in_any_batch():
    stack = init_stacks(CFG, {LAYER: tuple(range(CFG.num_experts))}, 3)[LAYER]
    rows, experts = _pairs(200, 2, seed=5)
    latents = _latents(200)
    whole, _ = finish(expert_forward(stack, group_rows(stack, rows, experts), latents, SITU))
    for pair in (0, 7, 131, 399):
        alone, _ = finish(
            expert_forward(
                stack,
                group_rows(stack, np.zeros(1, np.int32), experts[pair : pair + 1]),
                latents[rows[pair]][None],
                SITU,
            )
        )
        assert torch.equal(alone[0], whole[pair])


def test_gradients_do_not_depend_on_who_shares_the_process():
    everyone = init_stacks(CFG, {LAYER: tuple(range(CFG.num_experts))}, 3)[LAYER]
    some = init_stacks(CFG, {LAYER: (1, 6)}, 3)[LAYER]
    rows, experts = _pairs(90, 2, seed=6)
    latents, grad_rows = _latents(90), _latents(180, seed=7)
    own = np.flatnonzero(np.isin(experts, (1, 6)))
    results = []
    for stack, pairs in ((everyone, np.arange(180)), (some, own)):
        grouping = group_rows(stack, rows[pairs], experts[pairs])
        _, saved = finish(expert_forward(stack, grouping, latents, SITU))
        grads = stack.map(torch.zeros_like)
        finish(expert_backward(stack, grads, saved, grad_rows[pairs], SITU))
        results.append(grads.named(LAYER))
    for name, grad in results[1].items():
        assert torch.equal(grad, results[0][name]), name


def test_pieces_change_nothing_in_the_forward_and_yield_between(monkeypatch):
    stack = init_stacks(CFG, {LAYER: tuple(range(CFG.num_experts))}, 3)[LAYER]
    rows, experts = _pairs(300, 2, seed=8)
    latents = _latents(300)
    whole, _ = finish(expert_forward(stack, group_rows(stack, rows, experts), latents, SITU))
    monkeypatch.setattr(expert_math, "PIECE_FLOPS", 32 * 6 * 32 * 32)
    work = expert_forward(stack, group_rows(stack, rows, experts), latents, SITU)
    pauses = 0
    while True:
        try:
            next(work)
            pauses += 1
        except StopIteration as stop:
            pieces, _ = stop.value
            break
    assert pauses > 10
    assert torch.equal(pieces, whole)


def test_bank_serves_versions_side_by_side_and_refuses_what_it_does_not_hold():
    owned = dict.fromkeys(CFG.moe_layers, (0, 2, 5))
    bank = ExpertBank(CFG, owned)
    for version, seed in (("main@1-aaaaaaaaaaaa", 1), ("main@2-bbbbbbbbbbbb", 2)):
        stacks = init_stacks(CFG, all_experts(CFG), seed)
        tensors = {n: t for layer, s in stacks.items() for n, t in s.named(layer).items()}
        bank.load_version(version, {n: tensors[n].numpy() for n in owned_names(owned)})
    rows, experts = _pairs(4, 1, seed=1, experts=(0, 2, 5))

    def run(version, experts=experts):
        return finish(bank.forward(LAYER, version, _latents(4), rows, experts))

    first, second = run("main@1-aaaaaaaaaaaa"), run("main@2-bbbbbbbbbbbb")
    assert not torch.equal(first, second)
    with pytest.raises(PlanError, match=r"experts \[1\]"):
        run("main@1-aaaaaaaaaaaa", np.array([0, 1, 2, 5], np.int32))
    with pytest.raises(PlanError, match="layer 0"):
        finish(bank.forward(0, "main@1-aaaaaaaaaaaa", _latents(4), rows, experts))
    bank.drop_version("main@1-aaaaaaaaaaaa")
    with pytest.raises(StaleVersionError, match="not loaded"):
        run("main@1-aaaaaaaaaaaa")
    assert torch.equal(run("main@2-bbbbbbbbbbbb"), second)
