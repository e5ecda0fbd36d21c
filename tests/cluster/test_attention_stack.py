"""The attention stack as a real actor beside real groups: streams, terms, a killed group, exit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from k3ray.actors.attention_stack import AttentionStack
from k3ray.actors.expert_group import ExpertGroup
from k3ray.actors.initial_weights import write_initial_version
from k3ray.actors.specs import GroupSpec, StackSpec
from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.config.supernode import DeadlineConfig, EngineConfig, LanesConfig
from k3ray.engine.engine import Engine
from k3ray.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from k3ray.errors import CapacityError, FencedError, StaleVersionError, UnknownRequestError
from k3ray.ids import Incarnation
from k3ray.placement.plan import GroupPeer, PlacementPlan
from k3ray.weights.store import WeightStore
from tests.support.local_stack import local_runner
from tests.support.shares import only_share

pytestmark = pytest.mark.cluster

TEXT = PRESETS["k3-tiny"].text_config
CONFIG = EngineConfig(max_running=4, max_waiting=4, num_pages=64)
DEADLINES = DeadlineConfig(hop_s=10.0, prefill_chunk_s=20.0, rebuild_s=60.0)
LIMIT_S = 120.0
CONTROLLER_TERM = 3
HELD = {"group-0": (0, 2, 5), "group-1": (1, 3, 4, 6, 7)}


@dataclass(slots=True)
class Line:
    """Two groups and a stack, without a controller."""

    root: Path
    version: str
    stack: Any
    groups: dict[str, Any] = field(default_factory=dict)
    plan: PlacementPlan | None = None

    def start_group(self, actor: str, term: int) -> None:
        """Bring up a life of a group and give the stack a plan that names it."""
        experts = dict.fromkeys(TEXT.moe_layers, HELD[actor])
        spec = GroupSpec(
            incarnation=Incarnation(actor=actor, term=term), text=TEXT, line="main",
            shares=only_share(experts), store_dir=str(self.root / "store"),
            socket_dir=str(self.root), lanes=LanesConfig(),
            numeric_mode=NumericMode.DETERMINISTIC, deadlines=DEADLINES,
        )  # fmt: skip
        options = {"num_cpus": 0, "resources": {"k3_group": 1}, "max_concurrency": 4}
        handle = ExpertGroup.options(**options).remote(spec)
        facts = ray.get(handle.start.remote(), timeout=LIMIT_S)
        ray.get(handle.load_version.remote(self.version, CONTROLLER_TERM), timeout=LIMIT_S)
        self.groups[actor] = (handle, facts)
        peer = GroupPeer(incarnation=spec.incarnation, endpoint=facts["endpoint"])
        homes = tuple(
            next(a for a, held in HELD.items() if expert in held)
            for expert in range(TEXT.num_experts)
        )
        old = self.plan
        self.plan = PlacementPlan(
            version=1 if old is None else old.version + 1,
            homes=dict.fromkeys(TEXT.moe_layers, homes),
            peers={**({} if old is None else old.peers), actor: peer},
        )
        self.ask("set_plan", self.plan, CONTROLLER_TERM)

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.stack, method).remote(*args), timeout=LIMIT_S)

    def poll_until(self, name: str, count: int, *, term: int = 1) -> list[TokenEvent]:
        """Poll on until `count` events or the end."""
        events: list[TokenEvent] = []
        while len(events) < count and not (events and events[-1].finish):
            after = events[-1].position if events else -1
            events += self.ask("poll", name, after, term, 20.0)
        return events


def make_stack(root: Path, term: int = 1) -> Any:
    spec = StackSpec(
        incarnation=Incarnation(actor="stack-0", term=term), text=TEXT, line="main",
        store_dir=str(root / "store"), engine=CONFIG,
        numeric_mode=NumericMode.DETERMINISTIC, deadlines=DEADLINES,
    )  # fmt: skip
    options = {"num_cpus": 0, "resources": {"k3_stack": 1}}
    return AttentionStack.options(**options).remote(spec)


@pytest.fixture(scope="module")
def line(ray_local: Path) -> Iterator[Line]:
    root = ray_local / "s"
    version = write_initial_version(WeightStore(root / "store"), TEXT, line="main", seed=0)
    made = Line(root=root, version=str(version), stack=make_stack(root))
    facts = made.ask("start")
    assert set(facts) == {"pid", "node", "endpoint"}
    made.start_group("group-0", 1)
    made.start_group("group-1", 1)
    assert made.ask("load_version", made.version, CONTROLLER_TERM) == made.version
    yield made
    for handle, _ in made.groups.values():
        ray.kill(handle)
    ray.kill(made.stack)


def make_request(line: Line, name: str, **changes: Any) -> Request:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, num_logprobs=2)
    base = Request(
        request_id=name, prompt=tuple(range(40, 60)), seed=7, version=line.version,
        sampling=sampling,
    )  # fmt: skip
    return replace(base, **changes)


def expected(line: Line, request: Request) -> list[TokenEvent]:
    """What an engine in this process generates with all experts beside it."""
    runner = local_runner(TEXT, CONFIG, seeds={line.version: 0}, std=0.02)
    engine = Engine(TEXT, CONFIG, runner)
    engine.submit(request)
    while engine.step():
        pass
    return engine.read(request.request_id, after=-1, term=request.term)


def assert_same(got: list[TokenEvent], want: list[TokenEvent]) -> None:
    assert [(e.position, e.token, e.finish) for e in got] == [
        (e.position, e.token, e.finish) for e in want
    ]
    assert [e.logprob for e in got] == [e.logprob for e in want]


def test_streams_equal_the_local_engine(line: Line) -> None:
    requests = [make_request(line, f"stream-{i}", seed=i) for i in range(3)]
    for request in requests:
        assert line.ask("submit", request)
    for request in requests:
        got = line.poll_until(request.request_id, 12)
        assert_same(got, expected(line, request))
        assert {e.version for e in got} == {line.version}
        assert {e.plan for e in got} == {2}
    stats = line.ask("stats")
    assert (stats["running"], stats["free_slots"], stats["free_pages"]) == (0, 5, 64)
    assert stats["versions"] == (line.version,)
    assert stats["step_p50_s"] > 0


def test_terms_repeats_and_unknown_ids(line: Line) -> None:
    request = make_request(line, "terms", term=2)
    assert line.ask("submit", request)
    assert not line.ask("submit", replace(request, term=3))
    with pytest.raises(FencedError):
        line.ask("submit", request)
    with pytest.raises(FencedError):
        line.ask("poll", "terms", -1, 2, 1.0)
    assert len(line.poll_until("terms", 12, term=3)) == 12
    assert line.ask("poll", "terms", 11, 3, 0.01) == []
    with pytest.raises(UnknownRequestError):
        line.ask("poll", "never", -1, 1, 1.0)
    with pytest.raises(StaleVersionError):
        line.ask("submit", make_request(line, "stale", version="main@9-000000000000"))
    with pytest.raises(FencedError):
        line.ask("set_plan", line.plan, CONTROLLER_TERM - 1)


def test_cancel_ends_a_stream_and_versions_in_use_stay(line: Line) -> None:
    long = SamplingParams(max_tokens=2000, ignore_eos=True)
    line.ask("submit", make_request(line, "long", sampling=long))
    with pytest.raises(CapacityError):
        line.ask("drop_version", line.version, CONTROLLER_TERM)
    seen = line.poll_until("long", 2)
    line.ask("cancel", "long")
    rest = line.ask("poll", "long", seen[-1].position, 1, 20.0)
    assert rest[-1].finish is FinishReason.ABORTED


def test_scores_are_the_streams_logprobs(line: Line) -> None:
    request = make_request(line, "to-score")
    line.ask("submit", request)
    got = line.poll_until("to-score", 12)
    tokens = request.prompt + tuple(e.token for e in got if e.token is not None)
    first, second = line.ask("score", line.version, [tokens, tokens[:5]], 60.0)
    assert first[-12:].tolist() == [e.logprob for e in got]
    assert second.tolist() == first[:4].tolist()


def test_a_killed_group_only_stalls_the_stream(line: Line) -> None:
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    request = make_request(line, "killed", sampling=sampling)
    line.ask("submit", request)
    line.poll_until("killed", 3)
    handle, facts = line.groups["group-1"]
    os.kill(facts["pid"], signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(handle.block_until_dead.remote(), timeout=LIMIT_S)
    line.start_group("group-1", 2)
    got = line.poll_until("killed", 30)
    assert_same(got, expected(line, request))
    assert got[-1].plan == 3


def test_a_fenced_stack_exits_by_itself(line: Line) -> None:
    newer = make_stack(line.root, term=2)
    ray.get(newer.start.remote(), timeout=LIMIT_S)
    ray.get(newer.set_plan.remote(line.plan, CONTROLLER_TERM), timeout=LIMIT_S)
    ray.get(newer.load_version.remote(line.version, CONTROLLER_TERM), timeout=LIMIT_S)
    watch = line.stack.block_until_dead.remote()
    request = make_request(line, "moved")
    ray.get(newer.submit.remote(request), timeout=LIMIT_S)
    assert ray.get(newer.poll.remote("moved", -1, 1, 20.0), timeout=LIMIT_S)
    line.stack.submit.remote(make_request(line, "refused"))
    with pytest.raises(RayActorError):
        ray.get(watch, timeout=LIMIT_S)
    line.stack = newer
