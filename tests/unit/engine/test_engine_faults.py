"""The engine on a fake runner: lost hops, cancels, orphans, scores, churn."""

from __future__ import annotations

import random

import numpy as np
import pytest
from engine_cases import (
    Clock,
    assert_all_free,
    drain,
    events,
    make_engine,
    make_request,
    replace_config,
    run,
)

from k3ray.engine.request import FinishReason, SamplingParams
from k3ray.engine.runner import Work
from k3ray.errors import (
    CapacityError,
    ContextLengthError,
    K3RayError,
    NumericError,
    PeerLostError,
    StaleVersionError,
)
from tests.support.fake_runner import FakeRunner


def lose(times: int, when: int = 6) -> object:
    left = [times]

    def fail(work: Work) -> K3RayError | None:
        if work.start >= when and left[0]:
            left[0] -= 1
            return PeerLostError("group-0#1 is gone", peer="group-0#1")
        return None

    return fail


def test_a_lost_hop_is_healed_by_prefill_of_known_tokens() -> None:
    whole = run(make_request())
    engine, runner = make_engine()
    runner.fail = lose(1)
    engine.submit(make_request())
    drain(engine)
    assert events(engine) == whole
    assert engine.stats().recoveries_total == 1
    assert_all_free(engine)


def test_a_hop_lost_twice_ends_the_request_with_its_error() -> None:
    engine, runner = make_engine()
    runner.fail = lose(2, when=0)
    engine.submit(make_request())
    drain(engine)
    (end,) = events(engine)
    assert end.finish is FinishReason.ERROR
    assert end.error is not None
    assert end.error.startswith("peer_lost: group-0#1")
    assert_all_free(engine)


def test_other_errors_are_not_retried() -> None:
    engine, runner = make_engine()
    runner.fail = lambda work: StaleVersionError("v1 retired")
    engine.submit(make_request())
    drain(engine)
    assert [e.error for e in events(engine)] == ["stale_version: v1 retired"]


def test_cancel_of_waiting_and_running() -> None:
    engine, _ = make_engine()
    for index in range(6):
        engine.submit(make_request(f"r{index}"))
    engine.step()
    engine.cancel("r0")
    engine.cancel("r5")
    engine.cancel("r5")
    engine.cancel("never")
    drain(engine)
    for index in range(6):
        finishes = [e.finish for e in events(engine, f"r{index}") if e.finish]
        assert finishes == [FinishReason.ABORTED if index in (0, 5) else FinishReason.LENGTH]
    assert_all_free(engine)


def test_an_orphan_is_cancelled_and_a_polled_request_is_not() -> None:
    clock = Clock()
    engine, _ = make_engine(config=replace_config(), clock=clock)
    long = SamplingParams(max_tokens=400, ignore_eos=True)
    engine.submit(make_request("quiet", sampling=long))
    engine.submit(make_request("read", sampling=long))
    engine.step()
    clock.now_s += 59.0
    events(engine, "read")
    engine.step()
    clock.now_s += 2.0
    engine.step()
    assert events(engine, "quiet")[-1].finish is FinishReason.ABORTED
    assert events(engine, "read")[-1].finish is None


def test_unread_events_over_the_budget_cancel() -> None:
    engine, _ = make_engine(config=replace_config(event_budget=5))
    engine.submit(make_request())
    drain(engine)
    got = events(engine)
    assert got[-1].finish is FinishReason.ABORTED
    assert len(got) == 7
    assert_all_free(engine)


def test_versions_live_side_by_side() -> None:
    engine, _ = make_engine(FakeRunner(versions=("v1", "v2")))
    engine.submit(make_request("a"))
    engine.submit(make_request("b", version="v2"))
    engine.step()
    with pytest.raises(CapacityError, match="1 open requests pin weight version v2"):
        engine.check_droppable("v2")
    drain(engine)
    engine.check_droppable("v2")
    a, b = events(engine, "a"), events(engine, "b")
    assert {e.version for e in b} == {"v2"}
    assert [e.token for e in a] != [e.token for e in b]


def test_fail_all_ends_everything() -> None:
    engine, _ = make_engine()
    for index in range(6):
        engine.submit(make_request(f"r{index}"))
    future = engine.score("v1", (1, 2, 3))
    engine.step()
    late = engine.score("v1", (1, 2, 3))
    engine.fail_all(NumericError("the engine broke"))
    for index in range(6):
        assert events(engine, f"r{index}")[-1].error == "numeric: the engine broke"
    assert future.done()
    assert isinstance(late.exception(), NumericError)
    assert_all_free(engine)


def test_scores_are_the_sampled_logprobs() -> None:
    got = run(make_request())
    engine, _ = make_engine()
    request = make_request()
    tokens = request.prompt + tuple(e.token for e in got if e.token is not None)
    future = engine.score("v1", tokens)
    drain(engine)
    scored = future.result(timeout=0)
    assert scored.dtype == np.float32
    assert scored.shape == (len(tokens) - 1,)
    assert scored[-12:].tolist() == [e.logprob for e in got]
    assert_all_free(engine)


def test_scoring_runs_beside_generation_in_chunks_and_survives_a_lost_hop() -> None:
    whole = run(make_request())
    engine, runner = make_engine()
    tokens = tuple(i % 500 for i in range(200))
    clean = engine.score("v1", tokens)
    drain(engine)
    runner.fail = lose(1, when=128)
    again = engine.score("v1", tokens)
    engine.submit(make_request())
    drain(engine)
    assert again.result(timeout=0).tolist() == clean.result(timeout=0).tolist()
    assert events(engine) == whole
    assert engine.score("v1", (5,)).result(timeout=0).shape == (0,)
    with pytest.raises(ContextLengthError):
        engine.score("v1", (1,) * 3000)


def test_churn_leaves_nothing_behind() -> None:
    rng = random.Random(3)
    clock = Clock()
    config = replace_config(finished_retention_s=5, orphan_timeout_s=30)
    engine, runner = make_engine(config=config, clock=clock)
    open_ids: set[str] = set()
    finished = 0
    for turn in range(600):
        clock.now_s += 0.05
        if rng.random() < 0.5:
            name = f"q{turn}"
            sampling = SamplingParams(max_tokens=rng.randint(0, 20), ignore_eos=True)
            prompt = tuple(rng.randrange(512) for _ in range(rng.randint(1, 140)))
            try:
                engine.submit(make_request(name, prompt=prompt, sampling=sampling, seed=turn))
                open_ids.add(name)
            except CapacityError:
                pass
        if open_ids and rng.random() < 0.15:
            engine.cancel(rng.choice(sorted(open_ids)))
        runner.fail = (
            (lambda work: PeerLostError("gone")) if rng.random() < 0.02 else lambda work: None
        )
        engine.step()
        runner.batches.clear()
        for name in sorted(open_ids):
            got = events(engine, name)
            assert [e.position for e in got] == list(range(len(got)))
            assert all(e.finish is None for e in got[:-1])
            if got and got[-1].finish:
                open_ids.discard(name)
                finished += 1
    runner.fail = lambda work: None
    drain(engine)
    assert finished > 120
    assert_all_free(engine, config)
    clock.now_s += 100
    engine.step()
    assert len(engine._log) == 0
