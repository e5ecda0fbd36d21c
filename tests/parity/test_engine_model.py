"""The engine over the real model: continuation, batch mates and versions change no token."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from k3ray.config.numeric import NumericMode
from k3ray.config.presets import PRESETS
from k3ray.config.supernode import EngineConfig
from k3ray.engine.engine import Engine
from k3ray.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from k3ray.errors import PeerLostError
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.serve_state import SeqSpan, ServeState
from tests.support.local_stack import local_bank, local_engine, local_runner

CFG = PRESETS["k3-tiny"].text_config
CONFIG = EngineConfig(
    max_running=8, max_waiting=32, num_pages=64, prefill_chunk_tokens=64, step_token_budget=160
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    torch.set_num_threads(1)
    return local_engine(CFG, CONFIG, seeds={"v1": 0, "v2": 1})


def make_request(name: str, **changes: object) -> Request:
    base = Request(
        request_id=name,
        prompt=tuple(range(30, 80)),
        seed=11,
        version="v1",
        sampling=SamplingParams(max_tokens=8, ignore_eos=True),
    )
    return replace(base, **changes)


def drain(engine: Engine) -> None:
    while engine.step():
        pass


def read(engine: Engine, request: Request) -> list[TokenEvent]:
    return engine.read(request.request_id, after=len(request.emitted) - 1, term=1)


def run(engine: Engine, request: Request) -> list[TokenEvent]:
    engine.submit(request)
    drain(engine)
    return read(engine, request)


def assert_same(got: list[TokenEvent], want: list[TokenEvent]) -> None:
    assert [(e.position, e.token, e.finish, e.logprob) for e in got] == [
        (e.position, e.token, e.finish, e.logprob) for e in want
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_continuation_at_every_split(engine: Engine, temperature: float) -> None:
    sampling = SamplingParams(temperature=temperature, max_tokens=30, ignore_eos=True)
    name = f"split-{temperature}"
    whole = run(engine, make_request(name, sampling=sampling))
    tokens = tuple(e.token for e in whole if e.token is not None)
    assert len(tokens) == 30
    rest = [
        make_request(f"{name}-{split}", sampling=sampling, emitted=tokens[:split])
        for split in range(30)
    ]
    for start in range(0, 30, 24):
        for request in rest[start : start + 24]:
            engine.submit(request)
        drain(engine)
    for split, request in enumerate(rest):
        assert_same(read(engine, request), whole[split:])


def test_batch_mates_change_nothing_and_everything_is_freed(engine: Engine) -> None:
    requests = [
        make_request(
            f"mate-{i}",
            prompt=tuple((7 * i + j) % 500 for j in range(1 + 37 * i)),
            seed=i,
            version=("v1", "v2")[i % 2],
        )
        for i in range(8)
    ]
    alone = [run(engine, replace(r, request_id=f"alone-{r.request_id}")) for r in requests]
    for request in requests:
        engine.submit(request)
        engine.step()
    drain(engine)
    for request, want in zip(requests, alone, strict=True):
        assert_same(read(engine, request), want)
    stats = engine.stats()
    assert (stats.running, stats.free_slots, stats.free_pages) == (0, 9, 64)


def test_scores_are_the_sampled_logprobs(engine: Engine) -> None:
    request = make_request("scored", sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    got = run(engine, request)
    tokens = request.prompt + tuple(e.token for e in got if e.token is not None)
    future = engine.score("v1", tokens)
    drain(engine)
    assert future.result(timeout=0)[-30:].tolist() == [e.logprob for e in got]


def test_lost_hop_is_healed_from_half_advanced_state() -> None:
    runner = local_runner(CFG, CONFIG, seeds={"v1": 0})
    engine = Engine(CFG, CONFIG, runner)
    whole = run(engine, make_request("whole"))
    _, executor = runner._resolve("v1", 0)
    forward = executor.forward
    calls = [0]

    def flaky(layer: int, latents_TL: torch.Tensor, ids_TK: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 30:
            raise PeerLostError("group-0#1 is gone", peer="group-0#1")
        return forward(layer, latents_TL, ids_TK)

    executor.forward = flaky
    assert_same(run(engine, make_request("hurt")), whole)
    assert engine.stats().recoveries_total == 1


def test_a_poisoned_version_ends_its_requests_only() -> None:
    config = EngineConfig(max_running=4, num_pages=8, prefill_chunk_tokens=64)
    runner = local_runner(CFG, config, seeds={"v1": 0, "bad": 1})
    engine = Engine(CFG, config, runner)
    want = run(engine, make_request("before"))
    with torch.no_grad():
        next(iter(runner._models["bad"].parameters())).fill_(float("nan"))
    engine.submit(make_request("poisoned", version="bad"))
    engine.submit(make_request("sound"))
    drain(engine)
    assert_same(read(engine, make_request("sound")), want)
    (end,) = read(engine, make_request("poisoned"))
    assert end.finish is FinishReason.ERROR
    assert str(end.error).startswith("numeric:")
    # Every page and slot is used again, the poisoned ones too.
    filling = [make_request(f"fill-{i}", prompt=(5,) * 100, seed=3) for i in range(4)]
    for request in filling:
        engine.submit(request)
    drain(engine)
    for request in filling:
        assert_same(read(engine, request), read(engine, filling[0]))
    assert_same(run(engine, make_request("after")), want)


def test_fast_mode_serves_the_same_up_to_rounding(engine: Engine) -> None:
    request = make_request("fast", prompt=tuple(range(30, 150)))
    want = run(engine, request)
    got = run(local_engine(CFG, CONFIG, seeds={"v1": 0}, numeric=NumericMode.FAST), request)
    assert [event.token for event in got] == [event.token for event in want]
    for one, other in zip(got, want, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_a_model_and_a_state_of_two_modes_are_refused() -> None:
    state = ServeState(CFG, num_slots=1, num_pages=1, numeric=NumericMode.DETERMINISTIC)
    span = SeqSpan(slot=0, pages=(0,), start=0, length=1)
    executor = LocalExecutor(local_bank(CFG, {"v1": 0}), version="v1")
    with pytest.raises(ValueError, match="a fast model cannot serve from a deterministic state"):
        K3Model(CFG, numeric=NumericMode.FAST).forward_serve(
            torch.tensor([1]), [span], state, executor
        )
