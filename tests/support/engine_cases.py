"""Shared pieces of the engine tests: a clock, an engine on the fake runner, its ways to run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from k3ray.config.presets import PRESETS
from k3ray.config.supernode import EngineConfig
from k3ray.engine.engine import Engine
from k3ray.engine.request import Request, SamplingParams, TokenEvent
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


def make_request(name: str = "r", **changes: Any) -> Request:
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


def replace_config(**changes: int) -> EngineConfig:
    return EngineConfig(**{**CONFIG.model_dump(), **changes})
