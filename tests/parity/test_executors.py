"""Local = disaggregated, bit for bit, under any partition; a lost group changes nothing."""

import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from k3ray.config.presets import PRESETS
from k3ray.errors import PeerLostError, PlanError, StaleVersionError
from k3ray.model.disaggregated import DisaggregatedExecutor, HopLimits
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.expert_stack import all_experts
from k3ray.model.group_links import HEDGE_LEAST_S, GroupLinks
from k3ray.model.local_executor import LocalExecutor
from k3ray.placement.plan import PlacementPlan, replace_peer
from k3ray.transport.protocol import Lane
from tests.support.direct_client import (
    PlanBox,
    group_handler,
    loud_experts,
    peer_of,
    serve_partition,
)
from tests.support.shares import homes_of

CFG = PRESETS["k3-tiny"].text_config
VERSION = "main@1-aaaaaaaaaaaa"
PARTITIONS = {
    "one": ((0, 1, 2, 3, 4, 5, 6, 7),),
    "two": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "two-swapped": ((4, 5, 6, 7), (0, 1, 2, 3)),
    "uneven": ((3,), (0, 1, 2, 4, 5, 6, 7)),
    "three": ((0, 3, 6), (1, 4, 7), (2, 5)),
    "three-permuted": ((7, 2), (5, 0, 4), (6, 1, 3)),
}


def _handler(experts, tmp_path):
    return group_handler(CFG, loud_experts(CFG), experts, tmp_path, version=VERSION)


def _remote(partition, tmp_path, replication=1):
    client, plan = serve_partition(
        CFG, loud_experts(CFG), partition, tmp_path, version=VERSION, replication=replication
    )
    return client, PlanBox(plan)


def _batch(num_tokens):
    rng = np.random.default_rng(num_tokens)
    ids = np.stack([
        rng.choice(CFG.num_experts, CFG.num_experts_per_token, replace=False)
        for _ in range(num_tokens)
    ])  # fmt: skip
    generator = torch.Generator().manual_seed(num_tokens)
    latents = torch.randn(num_tokens, CFG.routed_expert_hidden_size, generator=generator)
    return latents, torch.from_numpy(ids)


def _local(num_tokens):
    bank = ExpertBank(CFG, all_experts(CFG))
    bank.load_version(VERSION, loud_experts(CFG))
    executor = LocalExecutor(bank, version=VERSION)
    return [executor.forward(layer, *_batch(num_tokens)) for layer in CFG.moe_layers]


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS.keys())
@pytest.mark.parametrize("num_tokens", [1, 5, 130])
def test_local_equals_disaggregated(partition, num_tokens, tmp_path):
    client, plans = _remote(partition, tmp_path)
    executor = DisaggregatedExecutor(GroupLinks(client), plans, version=VERSION)
    for layer, want in zip(CFG.moe_layers, _local(num_tokens), strict=True):
        got = executor.forward(layer, *_batch(num_tokens))
        assert torch.equal(got, want)


def test_a_token_is_sent_to_a_group_once(tmp_path):
    client, plans = _remote(PARTITIONS["two"], tmp_path)
    sent = []
    client.observe = lambda peer, message: sent.append(message)
    executor = DisaggregatedExecutor(GroupLinks(client), plans, version=VERSION)
    latents, ids = _batch(64)
    executor.forward(CFG.moe_layers[0], latents, ids)
    for index, message in enumerate(sent):
        here = (ids // 4 == index).any(dim=1)
        assert message.arrays[0].shape[0] == int(here.sum())
        assert (np.diff(message.arrays[1]) >= 0).all()


def test_a_lost_group_is_waited_for_and_only_its_part_is_sent_again(tmp_path):
    client, plans = _remote(PARTITIONS["two"], tmp_path)
    suspected, sent = [], []
    links = GroupLinks(client, on_lost=lambda who, error: suspected.append((who, error.code)))
    executor = DisaggregatedExecutor(links, plans, version=VERSION)
    layer = CFG.moe_layers[0]
    victim = plans.plan.peers["group-1"].incarnation

    def kill_on_first(peer, message):
        sent.append(str(peer))
        if peer == victim:
            client.kill(victim)

    def rebuild():
        peer = peer_of("group-1", 2)
        client.handlers[peer.incarnation] = _handler(PARTITIONS["two"][1], tmp_path)
        plans.plan = replace_peer(plans.plan, peer)

    client.observe, plans.on_wait = kill_on_first, rebuild
    got = executor.forward(layer, *_batch(32))
    assert torch.equal(got, _local(32)[0])
    assert suspected == [(victim, "peer_lost")]
    assert sent == ["group-0#1", "group-1#1", "group-1#2"]
    assert links.num_retries == 1


def test_no_new_life_within_the_deadline_is_the_peers_error(tmp_path):
    client, plans = _remote(PARTITIONS["one"], tmp_path)
    client.kill(plans.plan.peers["group-0"].incarnation)
    executor = DisaggregatedExecutor(
        GroupLinks(client), plans, version=VERSION, limits=HopLimits(rebuild_s=0.01)
    )
    with pytest.raises(PeerLostError, match="group-0#1"):
        executor.forward(CFG.moe_layers[0], *_batch(3))


@pytest.mark.parametrize("victim", ["group-0", "group-1", "group-2"])
@pytest.mark.parametrize("num_tokens", [1, 32, 130])
def test_a_replica_gives_the_same_rows_at_once(victim, num_tokens, tmp_path):
    """No plan is waited for: the copies are asked under the plan that still names the dead one."""
    client, plans = _remote(PARTITIONS["three-permuted"], tmp_path, replication=2)
    plans.on_wait = lambda: pytest.fail("waited for a plan")
    dead = plans.plan.peers[victim].incarnation
    executor = DisaggregatedExecutor(GroupLinks(client), plans, version=VERSION)
    first, second = CFG.moe_layers[:2]
    wanted = _local(num_tokens)
    assert torch.equal(executor.forward(first, *_batch(num_tokens)), wanted[0])
    client.kill(dead)
    sent = []
    client.observe = lambda peer, message: sent.append(peer)
    assert torch.equal(executor.forward(first, *_batch(num_tokens)), wanted[0])
    asked_once = sent.count(dead)
    assert asked_once <= 1
    assert torch.equal(executor.forward(second, *_batch(num_tokens)), wanted[1])
    assert sent.count(dead) == asked_once  # it is not asked again


def test_a_plan_without_the_lost_home_serves_from_replicas(tmp_path):
    client, plans = _remote(PARTITIONS["two"], tmp_path, replication=2)
    dead = plans.plan.peers["group-0"].incarnation
    client.kill(dead)
    peers = {"group-1": plans.plan.peers["group-1"]}
    plans.plan = replace(plans.plan, version=2, peers=peers)
    links = GroupLinks(client)
    executor = DisaggregatedExecutor(links, plans, version=VERSION)
    assert torch.equal(executor.forward(CFG.moe_layers[0], *_batch(32)), _local(32)[0])
    assert links.num_retries == 0


def test_both_holders_lost_waits_for_the_next_life(tmp_path):
    client, plans = _remote(PARTITIONS["three"], tmp_path, replication=2)
    for group in ("group-0", "group-1"):
        client.kill(plans.plan.peers[group].incarnation)

    def rebuild():
        peer = peer_of("group-0", 2)
        part, copies = PARTITIONS["three"][0], PARTITIONS["three"][2]
        client.handlers[peer.incarnation] = group_handler(
            CFG, loud_experts(CFG), part, tmp_path, version=VERSION, copies=copies
        )
        plans.plan = replace_peer(plans.plan, peer)

    plans.on_wait = rebuild
    executor = DisaggregatedExecutor(GroupLinks(client), plans, version=VERSION)
    assert torch.equal(executor.forward(CFG.moe_layers[0], *_batch(64)), _local(64)[0])


def test_a_slow_group_is_passed_over_and_asked_again_where_there_is_no_other(tmp_path):
    """The first answer of group-1 never comes in time."""
    for replication in (1, 2):
        client, plans = _remote(PARTITIONS["two"], tmp_path, replication=replication)
        plans.on_wait = lambda: pytest.fail("waited for a plan")
        slow = plans.plan.peers["group-1"].incarnation
        sent, wait = [], client.wait

        def late(pendings, deadline, wait=wait, sent=sent, slow=slow):
            if pendings[0].peer == slow and sent.count(slow) == 1:
                raise deadline.error()
            return wait(pendings, deadline)

        client.wait, client.observe = late, lambda peer, message, sent=sent: sent.append(peer)
        executor = DisaggregatedExecutor(GroupLinks(client), plans, version=VERSION)
        assert torch.equal(executor.forward(CFG.moe_layers[0], *_batch(32)), _local(32)[0])
        assert sent.count(slow) == (2 if replication == 1 else 1)


class Silent:
    """A pending that is done when the test says so."""

    def __init__(self, peer):
        self.peer, self.reply = peer, None

    def done(self):
        return self.reply is not None


@pytest.mark.parametrize("how", ["never", "later than the copy", "before the copy", "copy fails"])
def test_a_late_group_is_hedged_by_its_replicas(how, tmp_path):
    client, plans = _remote(PARTITIONS["two"], tmp_path, replication=2)
    plans.on_wait = lambda: pytest.fail("waited for a plan")
    late, other = (plans.plan.peers[g].incarnation for g in ("group-1", "group-0"))
    send, wait, sent, silent = client.send, client.wait, [], []

    def send_late(peer, message, *, lane):
        sent.append((peer, time.monotonic()))
        answer = send(peer, message, lane=lane)
        if peer == late and not silent:
            silent.append((Silent(peer), answer))
            return silent[0][0]
        if silent and how == "before the copy":
            silent[0][0].reply = silent[0][1]
        if silent and how == "copy fails" and peer == other:
            client.kill(other)
        return answer

    def wait_late(pendings, deadline):
        if isinstance(pendings[0], Silent):
            if pendings[0].reply is None and how == "copy fails":
                pendings[0].reply = silent[0][1]  # it was only slow
            assert pendings[0].reply is not None, "waited for the late one though a copy was there"
            return wait([silent[0][1]], deadline)
        return wait(pendings, deadline)

    def wait_any(pendings, deadline):
        if any(p.done() for p in pendings):
            return True
        time.sleep(deadline.left_s())
        return False

    client.send, client.wait, client.wait_any = send_late, wait_late, wait_any
    links = GroupLinks(client)
    executor = DisaggregatedExecutor(links, plans, version=VERSION)
    first, second = CFG.moe_layers[:2]
    assert torch.equal(executor.forward(first, *_batch(32)), _local(32)[0])
    assert [peer for peer, _ in sent] == [other, late, other]
    assert sent[2][1] - sent[1][1] >= HEDGE_LEAST_S
    assert (links.num_hedges, links.num_retries) == (1, 0)
    if how in ("never", "later than the copy"):
        assert torch.equal(executor.forward(second, *_batch(32)), _local(32)[1])
        assert [peer for peer, _ in sent[3:]] == [other], "passed over for a moment"


def test_nothing_is_hedged_without_replicas_or_on_other_lanes(tmp_path):
    for replication, lane in ((1, Lane.SERVE), (2, Lane.SCORE)):
        client, plans = _remote(PARTITIONS["two"], tmp_path, replication=replication)
        client.wait_any = lambda *_: pytest.fail("looked for a late answer")
        executor = DisaggregatedExecutor(GroupLinks(client), plans, version=VERSION, lane=lane)
        assert torch.equal(executor.forward(CFG.moe_layers[0], *_batch(32)), _local(32)[0])


def test_the_hedge_follows_the_p99_of_hops(tmp_path):
    client, _ = _remote(PARTITIONS["one"], tmp_path)
    links = GroupLinks(client)
    for _ in range(640):
        links.note_hop(0.001)
    assert links.hedge_s == HEDGE_LEAST_S
    for _ in range(640):
        links.note_hop(0.01)
    assert links.hedge_s == pytest.approx(0.05)


def test_unknown_version_is_refused(tmp_path):
    client, plans = _remote(PARTITIONS["one"], tmp_path)
    executor = DisaggregatedExecutor(GroupLinks(client), plans, version="main@9-cccccccccccc")
    with pytest.raises(StaleVersionError, match="not loaded"):
        executor.forward(CFG.moe_layers[0], *_batch(3))


def test_a_group_that_let_go_of_experts_between_two_plans_is_asked_by_the_newer_one(tmp_path):
    """The layer's call began under the old plan; its group holds only its new share by then."""
    client, plans = _remote(PARTITIONS["two"], tmp_path)
    executor = DisaggregatedExecutor(GroupLinks(client), plans, version=VERSION)
    victim = plans.plan.peers["group-1"].incarnation
    other = peer_of("group-2", 1)
    client.handlers[other.incarnation] = _handler((6, 7), tmp_path)
    moved = homes_of(((0, 1, 2, 3), (4, 5), (6, 7)), ("group-0", "group-1", "group-2"), CFG)

    def switch(peer, message):
        if peer == victim and plans.plan.version == 1:
            client.handlers[victim] = _handler((4, 5), tmp_path)
            peers = {**plans.plan.peers, "group-2": other}
            plans.plan = PlacementPlan(version=2, homes=moved, peers=peers, layout=2)

    client.observe = switch
    assert torch.equal(executor.forward(CFG.moe_layers[0], *_batch(32)), _local(32)[0])
    assert plans.plan.version == 2
    old = homes_of(PARTITIONS["two"], ("group-0", "group-1"), CFG)
    plans.plan = replace(plans.plan, version=3, homes=old)
    with pytest.raises(PlanError, match="not held here"):
        executor.forward(CFG.moe_layers[0], *_batch(32))
