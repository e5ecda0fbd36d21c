"""A committed step depends on seed, config and data only: not on groups, aborts or resumes."""

import numpy as np
import pytest
import torch

from k3ray.config.numeric import ExpertFormat
from k3ray.config.presets import PRESETS
from k3ray.errors import StepAbortedError
from k3ray.ids import Incarnation
from k3ray.model.checkpoint_codec import read_matrix
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.expert_stack import all_experts, owned_names
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.store_export import export_version
from k3ray.weights.checkpoint import Checkpoint
from k3ray.weights.manifest import EntryKind
from tests.support.toy_line import toy_line

THREE = ((7, 2), (5, 0, 4), (6, 1, 3))


def _master(line):
    """Every tensor of the newest checkpoint."""
    entry = line.store.latest("main", EntryKind.CHECKPOINT)
    return entry.manifest.step, entry.read(entry.names())


def _assert_same_line(a, b):
    (step_a, tensors_a), (step_b, tensors_b) = _master(a), _master(b)
    assert step_a == step_b
    assert tensors_a.keys() == tensors_b.keys()
    for name, tensor in tensors_a.items():
        assert np.array_equal(tensor, tensors_b[name]), name
    losses = {record.step: record.loss for record in a.authority.steps}
    assert losses == {record.step: record.loss for record in b.authority.steps}


@pytest.fixture(scope="module")
def fifty_local_steps(tmp_path_factory):
    local = toy_line(
        tmp_path_factory.mktemp("local"), steps=50, micro_batches=1, checkpoint_every=50
    )
    return local, local.loop.run()


@pytest.fixture(scope="module")
def seven_calm_steps(tmp_path_factory):
    line = toy_line(tmp_path_factory.mktemp("calm"), partition=THREE, steps=7)
    line.loop.run()
    return line


@pytest.mark.parametrize(
    "partition",
    [(range(8),), (range(4), range(4, 8)), ((3,), (0, 1, 2, 4, 5, 6, 7)), THREE],
    ids=["one", "two", "uneven", "three-permuted"],
)
def test_fifty_steps_local_equal_disaggregated(partition, fifty_local_steps, tmp_path):
    local, result = fifty_local_steps
    remote = toy_line(
        tmp_path / "remote", partition=partition, steps=50, micro_batches=1, checkpoint_every=50
    )
    remote.loop.run()
    _assert_same_line(local, remote)
    assert result.first_loss > 5.5
    assert result.last_loss < 0.6 * result.first_loss


@pytest.fixture(scope="module")
def quantised_lines(tmp_path_factory):
    """A line whose experts are MXFP4, in one process and in three groups."""
    root = tmp_path_factory.mktemp("quantised")
    lines = [
        toy_line(root / str(partition), partition=partition, steps=6, numbers=ExpertFormat.MXFP4)
        for partition in (None, THREE)
    ]
    for line in lines:
        line.loop.run()
    return lines


def test_quantised_training_is_the_same_wherever_the_experts_are(quantised_lines, tmp_path):
    local, remote = quantised_lines
    _assert_same_line(local, remote)
    plain = toy_line(tmp_path, partition=THREE, steps=6)
    plain.loop.run()
    losses = [[record.loss for record in line.authority.steps] for line in (plain, remote)]
    assert losses[0] != losses[1]


def test_what_a_quantised_line_publishes_serves_the_trainers_rows(quantised_lines, tmp_path):
    """Trainer, serving bank and MXFP4 checkpoint: the same experts, byte for byte."""
    model = PRESETS["k3-tiny"]
    cfg = model.text_config
    for number, line in enumerate(quantised_lines):
        version = line.store.latest("main")
        names = owned_names(all_experts(cfg))
        published = version.read(names)
        bank = ExpertBank(cfg, all_experts(cfg))
        bank.load_version("v", published)
        latents = torch.randn(33, cfg.routed_expert_hidden_size)
        ids = torch.stack([torch.randperm(cfg.num_experts)[:3].sort().values for _ in range(33)])
        for layer in cfg.moe_layers:
            trained = line.parts.experts.eval_executor(6).forward(layer, latents, ids)
            served = LocalExecutor(bank, version="v").forward(layer, latents, ids)
            assert torch.equal(served, trained)
        out = tmp_path / str(number)
        export_version(
            line.store, out, line="main", version=None, model=model, experts=ExpertFormat.MXFP4
        )
        written = Checkpoint.open(out)
        for name in names:
            assert np.array_equal(read_matrix(written, name).numpy(), published[name]), name


def test_abort_and_retry_equal_no_abort(tmp_path):
    calm = toy_line(tmp_path / "calm", partition=THREE, steps=4)
    calm.loop.run()
    shaken = toy_line(tmp_path / "shaken", partition=THREE, steps=4)
    refused = []

    def refuse_once(record):
        if record.step in (2, 4) and record.step not in refused:
            refused.append(record.step)
            raise StepAbortedError("another attempt is open", remedy="retry")

    shaken.authority.on_commit = refuse_once
    shaken.loop.run()
    assert refused == [2, 4]
    assert [r.step for r in shaken.authority.steps] == [1, 2, 3, 4]
    assert "rolled_back" not in shaken.journal.names()
    _assert_same_line(calm, shaken)


@pytest.mark.parametrize("op", ["train_forward", "train_backward", "train_norms", "train_prepare",
                                "train_apply", "train_save", "train_publish"])  # fmt: skip
def test_a_lost_group_rolls_the_line_back_and_gives_the_same_model(op, seven_calm_steps, tmp_path):
    calm = seven_calm_steps
    shaken = toy_line(tmp_path / "shaken", partition=THREE, steps=7)
    victim = Incarnation(actor="group-1", term=1)
    seen = []

    def kill(peer, message):
        if peer == victim and message.op == op:
            seen.append(message.meta.get("step"))
            last = op in ("train_save", "train_publish")
            if last or message.meta["step"] == 5:
                shaken.groups.kill("group-1")

    shaken.groups.client.observe = kill
    result = shaken.loop.run()
    assert result.step == 7
    assert seen
    assert "rolled_back" in shaken.journal.names()
    _assert_same_line(calm, shaken)
    versions = [line.store.latest("main").version for line in (calm, shaken)]
    assert versions[0] == versions[1]


def test_a_group_that_dies_at_every_try_ends_the_run_with_the_reason(tmp_path):
    line = toy_line(tmp_path, partition=THREE, steps=3, max_attempts_per_step=3)

    def kill(peer, message):
        if peer.actor == "group-0" and message.op == "train_norms":
            line.groups.kill("group-0")

    line.groups.client.observe = kill
    with pytest.raises(StepAbortedError, match="group-0#3"):
        line.loop.run()
    assert line.authority.steps == []


def test_resumed_equals_uninterrupted(seven_calm_steps, tmp_path):
    whole = seven_calm_steps
    first = toy_line(tmp_path / "cut", partition=THREE, steps=7)

    def stop(record):
        if record.step == 5:
            raise KeyboardInterrupt

    first.authority.on_commit = stop
    with pytest.raises(KeyboardInterrupt):
        first.loop.run()
    second = toy_line(tmp_path / "cut", partition=((0, 1, 2, 3, 4, 5), (6, 7)), steps=7)
    second.loop.run()
    assert second.journal.events[0] == (
        "resumed", {"step": 3, "checkpoint": first.authority.checkpoints[-1]},
    )  # fmt: skip
    assert [r.step for r in second.authority.steps] == [4, 5, 6, 7]
    (_, a), (_, b) = _master(whole), _master(second)
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_a_plan_change_inside_a_step_aborts_it_without_losing_the_line(tmp_path):
    line = toy_line(tmp_path, partition=THREE, steps=2)
    changed = []

    def change(peer, message):
        if message.op == "train_backward" and not changed:
            changed.append(1)
            plan = line.groups.plans.plan
            line.groups.plans.plan = type(plan)(
                version=plan.version + 1, homes=plan.homes, peers=plan.peers
            )

    line.groups.client.observe = change
    line.loop.run()
    assert [r.step for r in line.authority.steps] == [1, 2]
    assert line.authority.steps[0].attempt == 2
    assert "rolled_back" not in line.journal.names()


@pytest.mark.parametrize("partition", [((0, 1, 4), (2, 3, 7), (5, 6)), (tuple(range(8)),)])
def test_another_layout_inside_a_step_goes_back_to_the_checkpoint_and_replays(partition, tmp_path):
    """Experts get other homes while a step runs: the losses and the master are those of a line
    that nobody disturbed."""
    calm = toy_line(tmp_path / "calm", partition=((0, 1, 2, 3), (4, 5, 6, 7)), steps=7)
    calm.loop.run()
    line = toy_line(tmp_path / "moved", partition=((0, 1, 2, 3), (4, 5, 6, 7)), steps=7)
    changed = []

    def change(peer, message):
        if message.op == "train_backward" and message.meta["step"] == 5 and not changed:
            changed.append(1)
            line.groups.rescale(partition)

    line.groups.client.observe = change
    line.loop.run()
    assert changed
    assert line.journal.losses == calm.journal.losses
    assert "rolled_back" in line.journal.names()
    (_, a), (_, b) = _master(calm), _master(line)
    assert all(np.array_equal(a[name], b[name]) for name in a)
