"""ExpertTrainer: AdamW's own bits, and the fences around attempts."""

import numpy as np
import pytest
import torch

from k3ray.config.numeric import ExpertFormat
from k3ray.config.presets import PRESETS
from k3ray.errors import ConfigError, PlanError, StaleVersionError
from k3ray.model.expert_math import finish
from k3ray.model.expert_stack import all_experts, init_stacks
from k3ray.train.expert_trainer import ExpertTrainer
from k3ray.train.step_tag import StepTag, UpdatePlan

CFG = PRESETS["k3-tiny"].text_config
LAYER = CFG.moe_layers[0]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def _tag(step=1, attempt=1, line="main"):
    return StepTag(line=line, step=step, attempt=attempt)


def _plan(num_updates=0, *, skip=False, grad_scale=1.0):
    return UpdatePlan(**HYPER, grad_scale=grad_scale, skip=skip, num_updates=num_updates)


def _trainer():
    trainer = ExpertTrainer(CFG, all_experts(CFG))
    trainer.init(seed=5)
    return trainer


def _run(trainer, tag, seed=0, num_rows=20):
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(num_rows, dtype=np.int32), 2)
    experts = np.stack([rng.choice(CFG.num_experts, 2, replace=False) for _ in range(num_rows)])
    generator = torch.Generator().manual_seed(seed)
    latents = torch.randn(num_rows, CFG.routed_expert_hidden_size, generator=generator)
    grads = torch.randn(2 * num_rows, CFG.routed_expert_hidden_size, generator=generator)
    pairs = experts.reshape(-1).astype(np.int32)
    finish(trainer.forward(tag, (0, LAYER), latents, rows, pairs))
    return finish(trainer.backward(tag, (0, LAYER), grads))


def _weights(trainer):
    return {n: t.copy() for n, t in trainer.checkpoint_tensors().items()}


def _same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[n], b[n]) for n in a)


def test_three_updates_equal_torch_adamw_bit_for_bit():
    trainer = _trainer()
    stack = init_stacks(CFG, all_experts(CFG), 5)[LAYER]
    parameters = [torch.nn.Parameter(t) for t in stack.tensors()]
    reference = torch.optim.AdamW(
        parameters, lr=HYPER["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    for step in (1, 2, 3):
        tag = _tag(step)
        _run(trainer, tag, seed=step)
        for parameter, grad in zip(parameters, trainer._state.grads[LAYER].tensors(), strict=True):
            parameter.grad = grad.clone()
        reference.step()
        finish(trainer.prepare(tag, _plan(step - 1)))
        trainer.apply(tag)
    for parameter, master in zip(parameters, trainer.weight_stacks()[LAYER].tensors(), strict=True):
        assert torch.equal(parameter.data, master)


def test_nothing_changes_before_apply_and_apply_is_idempotent():
    trainer = _trainer()
    before = _weights(trainer)
    _run(trainer, _tag())
    digest = finish(trainer.prepare(_tag(), _plan()))
    assert _same(before, _weights(trainer))
    trainer.apply(_tag())
    after = _weights(trainer)
    assert not _same(before, after)
    trainer.apply(_tag())
    assert _same(after, _weights(trainer))
    assert trainer.committed_step == 1
    assert len(digest) == 32


def test_an_aborted_attempt_leaves_no_trace():
    calm, shaken = _trainer(), _trainer()
    _run(shaken, _tag(attempt=1), seed=99)
    finish(shaken.prepare(_tag(attempt=1), _plan()))
    shaken.abort(_tag(attempt=1))
    for trainer, tag in ((calm, _tag(attempt=1)), (shaken, _tag(attempt=2))):
        _run(trainer, tag, seed=1)
        finish(trainer.prepare(tag, _plan()))
        trainer.apply(tag)
    assert _same(_weights(calm), _weights(shaken))


@pytest.mark.parametrize("how", ["superseded", "aborted"])
def test_messages_of_an_older_attempt_are_refused(how):
    trainer = _trainer()
    _run(trainer, _tag(attempt=3))
    if how == "superseded":
        _run(trainer, _tag(attempt=4))
    else:
        trainer.abort(_tag(attempt=3))
    with pytest.raises(StaleVersionError) as caught:
        _run(trainer, _tag(attempt=3))
    assert caught.value.fields["reason"] == "older_attempt"
    trainer.abort(_tag(attempt=3))
    _run(trainer, _tag(attempt=5 if how == "superseded" else 4))


@pytest.mark.parametrize(
    ("tag", "reason"),
    [(_tag(step=2), "other_step"), (_tag(line="side"), "other_line")],
    ids=["step", "line"],
)
def test_other_steps_and_lines_are_refused(tag, reason):
    with pytest.raises(StaleVersionError) as caught:
        _run(_trainer(), tag)
    assert caught.value.fields["reason"] == reason


def test_without_a_master_nothing_trains():
    trainer = ExpertTrainer(CFG, all_experts(CFG))
    with pytest.raises(StaleVersionError) as caught:
        _run(trainer, _tag())
    assert caught.value.fields["reason"] == "no_master"
    trainer.abort(_tag())
    with pytest.raises(StaleVersionError):
        trainer.apply(_tag())


def test_backward_needs_its_forward_and_apply_its_prepare():
    trainer = _trainer()
    with pytest.raises(StaleVersionError, match="not_forwarded"):
        finish(trainer.backward(_tag(), (0, LAYER), torch.zeros(2, 32)))
    with pytest.raises(StaleVersionError, match="not_prepared"):
        trainer.apply(_tag())


def test_a_skipped_step_counts_but_changes_nothing():
    trainer = _trainer()
    before = _weights(trainer)
    _run(trainer, _tag())
    finish(trainer.prepare(_tag(), _plan(skip=True, grad_scale=0.0)))
    trainer.apply(_tag())
    assert _same(before, _weights(trainer))
    assert trainer.committed_step == 1


def test_a_checkpoint_holds_everything():
    trainer, copy = _trainer(), ExpertTrainer(CFG, all_experts(CFG))
    _run(trainer, _tag())
    finish(trainer.prepare(_tag(), _plan()))
    trainer.apply(_tag())
    copy.load(_weights(trainer), step=1)
    for one in (trainer, copy):
        _run(one, _tag(step=2, attempt=2), seed=3)
        finish(one.prepare(_tag(step=2, attempt=2), _plan(1)))
        one.apply(_tag(step=2, attempt=2))
    assert _same(_weights(trainer), _weights(copy))
    with pytest.raises(PlanError, match="missing"):
        copy.load({}, step=1)
    assert copy.committed_step == 2


def test_norms_are_by_name_and_do_not_depend_on_the_partition():
    whole, part = _trainer(), ExpertTrainer(CFG, {LAYER: (1, 6)})
    part.init(seed=5)
    _run(whole, _tag())
    for stacks, own in ((part._state.grads, (1, 6)),):
        for slot, expert in enumerate(own):
            for mine, all_of_them in zip(
                stacks[LAYER].tensors(), whole._state.grads[LAYER].tensors(), strict=True
            ):
                mine[slot] = all_of_them[expert]
    want = finish(whole.norms(_tag()))
    got = finish(part.norms(_tag()))
    assert got
    assert got == {name: want[name] for name in got}


QUANTISED = [ExpertFormat.BF16, ExpertFormat.MXFP4]


def _round(kind, x):
    """The format written out by hand; its own grid, rounded by distance, ties to even."""
    if kind is ExpertFormat.BF16:
        return x.bfloat16().float()
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(amax)) - 2)
    scale = torch.where(amax > 0, scale, torch.ones_like(scale))
    grid = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (blocks.abs() / scale).clamp(max=6.0).unsqueeze(-1) - grid
    # among equally near ones the even index: odd ones are put off by a hair
    code = (distance.abs() + 1e-9 * (torch.arange(8) % 2)).argmin(-1)
    return (grid[code] * blocks.sign() * scale).flatten(-2).float()


def _situ(x, beta):
    return beta * torch.tanh(x / beta)


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_training_is_straight_through_and_updates_the_float32_master(kind):
    """Against autograd over w + (round(w) - w).detach() and torch's AdamW."""
    trainer = ExpertTrainer(CFG, all_experts(CFG))
    trainer.init(seed=5, experts=kind)
    stack = init_stacks(CFG, all_experts(CFG), 5)[LAYER]
    w1, w2, w3 = parameters = [torch.nn.Parameter(t) for t in stack.tensors()]
    optimizer = torch.optim.AdamW(
        parameters, lr=HYPER["lr"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False
    )
    beta, linear_beta = trainer._situ.beta, trainer._situ.linear_beta
    for step in (1, 2, 3):
        generator = torch.Generator().manual_seed(step)
        latents = torch.randn(17, CFG.routed_expert_hidden_size, generator=generator)
        grads = torch.randn(17, CFG.routed_expert_hidden_size, generator=generator)
        experts = np.arange(17, dtype=np.int32) % 3
        rows = np.arange(17, dtype=np.int32)
        tag = _tag(step)
        out = finish(trainer.forward(tag, (0, LAYER), latents, rows, experts))
        dx = finish(trainer.backward(tag, (0, LAYER), grads))
        x = latents.clone().requires_grad_()
        q1, q2, q3 = (w + (_round(kind, w.detach()) - w).detach() for w in (w1, w2, w3))
        picked = torch.from_numpy(experts.astype(np.int64))
        gate = torch.einsum("nl,nfl->nf", x, q1[picked])
        up = torch.einsum("nl,nfl->nf", x, q3[picked])
        hidden = _situ(gate, beta) * torch.sigmoid(gate) * _situ(up, linear_beta)
        wanted = torch.einsum("nf,nlf->nl", hidden, q2[picked])
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
        optimizer.zero_grad()
        wanted.backward(grads)
        torch.testing.assert_close(dx, x.grad, rtol=1e-5, atol=1e-6)
        for parameter, own in zip(parameters, trainer._state.grads[LAYER].tensors(), strict=True):
            torch.testing.assert_close(own, parameter.grad, rtol=1e-5, atol=1e-6)
            parameter.grad = own.clone()  # the update is then comparable bit for bit
        optimizer.step()
        finish(trainer.prepare(tag, _plan(step - 1)))
        trainer.apply(tag)
    masters = trainer._state.committed.master[LAYER].tensors()
    weights = trainer.weight_stacks()[LAYER].tensors()
    for parameter, master, weight in zip(parameters, masters, weights, strict=True):
        assert torch.equal(parameter.data, master)
        assert torch.equal(weight, _round(kind, master))
        assert not torch.equal(weight, master)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_quantised_line_goes_on_from_its_checkpoint_with_the_same_bits(kind):
    calm, cut = (ExpertTrainer(CFG, all_experts(CFG)) for _ in range(2))
    calm.init(seed=5, experts=kind)
    _run(calm, _tag(1), seed=1)
    finish(calm.prepare(_tag(1), _plan(0)))
    calm.apply(_tag(1))
    cut.load(_weights(calm), step=1, experts=kind)
    for trainer in (calm, cut):
        _run(trainer, _tag(2), seed=2)
        finish(trainer.prepare(_tag(2), _plan(1)))
        trainer.apply(_tag(2))
    assert _same(_weights(calm), _weights(cut))
    assert (
        calm.size_bytes
        == cut.size_bytes
        == 9 * sum(t.numel() * 4 for s in calm.weight_stacks().values() for t in s.tensors())
    )


def test_a_format_that_does_not_fit_the_sizes_changes_nothing():
    odd = CFG.model_copy(update={"moe_intermediate_size": 24})
    trainer = ExpertTrainer(odd, all_experts(odd))
    trainer.init(seed=5)
    before = _weights(trainer)
    with pytest.raises(ConfigError, match="blocks of 32"):
        trainer.init(seed=6, experts=ExpertFormat.MXFP4)
    with pytest.raises(ConfigError, match="blocks of 32"):
        trainer.load(before, step=3, experts=ExpertFormat.MXFP4)
    assert _same(before, _weights(trainer))
    assert trainer.committed_step == 0
