from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from k3ray.config.presets import PRESETS
from k3ray.config.supernode import EngineConfig
from k3ray.engine.engine import Engine
from k3ray.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from k3ray.engine.runner import Work
from k3ray.errors import (
    BadRequestError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    FencedError,
    K3RayError,
    NumericError,
    PeerLostError,
    StaleVersionError,
)
from tests.support.fake_runner import FakeRunner

TEXT = PRESETS["k3-tiny"].text_config
CONFIG = EngineConfig(
    max_running=4, max_waiting=4, num_pages=32, prefill_chunk_tokens=64, step_token_budget=128
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def make_engine(
    runner: FakeRunner | None = None, config: EngineConfig = CONFIG, clock: Clock | None = None
) -> tuple[Engine, FakeRunner]:
    runner = runner or FakeRunner()
    return Engine(TEXT, config, runner, clock=clock or Clock()), runner


def make_request(name: str = "r", **changes: object) -> Request:
    base = Request(
        request_id=name,
        prompt=(3, 1, 4, 1, 5),
        seed=11,
        version="v1",
        sampling=SamplingParams(max_tokens=12, ignore_eos=True),
    )
    return replace(base, **changes)


def drain(engine: Engine, limit: int = 10_000) -> None:
    for _ in range(limit):
        if not engine.step():
            return
    raise AssertionError("engine did not come to rest")


def events(engine: Engine, name: str = "r", after: int = -1, term: int = 1) -> list[TokenEvent]:
    return engine.read(name, after=after, term=term)


def run(request: Request, config: EngineConfig = CONFIG) -> list[TokenEvent]:
    engine, _ = make_engine(config=config)
    engine.submit(request)
    drain(engine)
    return events(engine, request.request_id, after=len(request.emitted) - 1)


def assert_all_free(engine: Engine, config: EngineConfig = CONFIG) -> None:
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.scoring) == (0, 0, 0)
    assert stats.free_slots == config.max_running + 1
    assert stats.free_pages + stats.quarantined_pages == config.num_pages


def test_a_request_yields_its_tokens_and_one_finish() -> None:
    got = run(make_request())
    assert [e.position for e in got] == list(range(12))
    assert [e.finish for e in got] == [None] * 11 + [FinishReason.LENGTH]
    assert {(e.version, e.plan) for e in got} == {("v1", 7)}
    assert all(e.logprob < 0 for e in got)


def test_prompt_is_prefilled_on_aligned_chunks() -> None:
    engine, runner = make_engine()
    engine.submit(make_request(prompt=tuple(range(150))))
    drain(engine)
    spans = [(w.start, len(w.tokens)) for batch in runner.batches for w in batch]
    assert spans[:4] == [(0, 64), (64, 64), (128, 22), (150, 1)]


def test_stop_tokens_end_the_request_and_are_reported() -> None:
    first = run(make_request())[3].token
    assert first is not None
    stopped = run(make_request(sampling=SamplingParams(max_tokens=12, stop_token_ids=(first,))))
    assert stopped[-1].token == first
    assert stopped[-1].finish is FinishReason.STOP
    assert len(stopped) <= 4


def test_eos_ends_unless_ignored() -> None:
    biased = ((TEXT.eos_token_id, 1000.0),)
    ended = run(make_request(sampling=SamplingParams(max_tokens=5, logit_bias=biased)))
    assert [(e.token, e.finish) for e in ended] == [(TEXT.eos_token_id, FinishReason.STOP)]
    kept = run(
        make_request(sampling=SamplingParams(max_tokens=5, logit_bias=biased, ignore_eos=True))
    )
    assert len(kept) == 5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuation_at_every_split_gives_the_same_tokens(temperature: float) -> None:
    sampling = SamplingParams(
        temperature=temperature,
        max_tokens=70,
        ignore_eos=True,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        num_logprobs=2,
    )
    whole = run(make_request(sampling=sampling))
    tokens = tuple(e.token for e in whole if e.token is not None)
    for split in range(71):
        rest = run(make_request(sampling=sampling, emitted=tokens[:split]))
        if split < 70:
            assert rest == whole[split:]
        else:
            assert [(e.position, e.token, e.finish) for e in rest] == [
                (70, None, FinishReason.LENGTH)
            ]


def test_batch_mates_do_not_change_tokens() -> None:
    requests = [make_request(f"r{i}", prompt=tuple(range(1, 40 * i + 2)), seed=i) for i in range(6)]
    alone = [run(request) for request in requests]
    engine, _ = make_engine()
    for request in requests:
        engine.submit(request)
        engine.step()
    drain(engine)
    assert [events(engine, r.request_id) for r in requests] == alone
    assert_all_free(engine)


def test_choices_and_seeds_differ() -> None:
    streams = [
        tuple(e.token for e in run(make_request(seed=seed, choice=choice)))
        for seed in (1, 2)
        for choice in (0, 1)
    ]
    assert len(set(streams)) == 4


def test_repeat_attaches_and_a_lower_term_is_fenced() -> None:
    engine, runner = make_engine()
    assert engine.submit(make_request(term=2))
    engine.step()
    engine.step()
    seen = events(engine, term=2)
    assert not engine.submit(make_request(term=3, emitted=(seen[0].token,)))
    with pytest.raises(FencedError):
        engine.submit(make_request(term=2))
    with pytest.raises(FencedError):
        events(engine, term=2)
    drain(engine)
    assert len(events(engine, term=3)) == 12
    assert not engine.submit(make_request(term=3))
    assert engine.stats().requests_total == 1
    with pytest.raises(BadRequestError, match="different request"):
        engine.submit(make_request(term=3, seed=99))
    assert len(runner.batches) == 12


def test_resubmission_after_an_abort_starts_over_with_emitted() -> None:
    whole = run(make_request())
    engine, _ = make_engine()
    engine.submit(make_request())
    for _ in range(4):
        engine.step()
    engine.cancel("r")
    aborted = events(engine)
    assert [e.finish for e in aborted] == [None] * 4 + [FinishReason.ABORTED]
    kept = tuple(e.token for e in aborted[:4])
    assert engine.submit(make_request(emitted=kept, term=2))
    drain(engine)
    assert events(engine, after=3, term=2) == whole[4:]
    assert_all_free(engine)


def test_a_stack_behind_the_client_starts_over() -> None:
    whole = run(make_request())
    tokens = tuple(e.token for e in whole)
    engine, _ = make_engine()
    engine.submit(make_request())
    engine.step()
    assert engine.submit(make_request(emitted=tokens[:5], term=2))
    drain(engine)
    assert events(engine, after=4, term=2) == whole[5:]
    assert_all_free(engine)


def test_doors_refuse_and_leave_no_trace() -> None:
    engine, _ = make_engine()
    for bad in (
        make_request(prompt=()),
        make_request(prompt=(512,)),
        make_request(emitted=(-1,)),
        make_request(choice=-1),
    ):
        with pytest.raises(BadRequestError):
            engine.submit(bad)
    with pytest.raises(StaleVersionError, match="v9"):
        engine.submit(make_request(version="v9"))
    with pytest.raises(ContextLengthError, match=r"8200.*8212.*8192"):
        engine.submit(make_request(prompt=(1,) * 8200))
    with pytest.raises(ContextLengthError, match=r"need 33 pages.* has 32"):
        engine.submit(make_request(prompt=(1,) * 2040))
    assert engine.stats().requests_total == 0
    assert not engine.step()


def test_too_much_load_is_refused_with_a_time_to_retry() -> None:
    engine, _ = make_engine()
    for index in range(8):
        engine.submit(make_request(f"r{index}"))
    with pytest.raises(CapacityError) as caught:
        engine.submit(make_request("late"))
    assert caught.value.fields["retry_after_s"] >= 1.0
    drain(engine)
    engine.submit(make_request("late"))


def test_budget_must_leave_room_for_prefill() -> None:
    with pytest.raises(ConfigError, match="step_token_budget"):
        make_engine(config=EngineConfig(max_running=16, step_token_budget=64))


def test_nan_ends_its_request_alone_and_quarantines() -> None:
    engine, runner = make_engine()
    good = make_request("good", seed=5)
    alone = run(good)
    engine.submit(make_request("bad", prompt=(9,) * 70))
    engine.submit(good)
    runner.fail = lambda work: "nan" if work.tokens[0] == 9 and work.start == 64 else None
    drain(engine)
    assert events(engine, "good") == alone
    (end,) = events(engine, "bad")
    assert end.finish is FinishReason.ERROR
    assert end.error is not None
    assert end.error.startswith("numeric:")
    stats = engine.stats()
    assert stats.quarantined_pages == 2
    assert stats.free_slots == CONFIG.max_running
    assert stats.free_pages == CONFIG.num_pages - 2


def test_quarantined_pages_return_when_needed() -> None:
    config = replace_config(num_pages=2, max_running=1)
    engine, runner = make_engine(config=config)
    runner.fail = lambda work: "nan"
    engine.submit(make_request("bad", prompt=(9,) * 70))
    drain(engine)
    runner.fail = lambda work: None
    engine.submit(make_request("next", prompt=(8,) * 70))
    drain(engine)
    assert len(events(engine, "next")) == 12


def replace_config(**changes: int) -> EngineConfig:
    return EngineConfig(**{**CONFIG.model_dump(), **changes})


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
