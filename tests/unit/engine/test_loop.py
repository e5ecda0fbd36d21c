from __future__ import annotations

import threading
import time

from k3ray.config.presets import PRESETS
from k3ray.config.supernode import EngineConfig
from k3ray.engine.engine import Engine
from k3ray.engine.loop import EngineLoop
from k3ray.engine.request import FinishReason, Request, SamplingParams
from k3ray.engine.runner import Work
from k3ray.errors import FencedError
from tests.support.fake_runner import FakeRunner

TEXT = PRESETS["k3-tiny"].text_config


class Harness:
    """An engine on its loop, with the last fatal error."""

    def __init__(self) -> None:
        self.runner = FakeRunner()
        self.news = threading.Event()
        self.engine = Engine(TEXT, EngineConfig(), self.runner, on_events=self.news.set)
        self.fatal: list[BaseException] = []
        self.dead = threading.Event()
        self.loop = EngineLoop(self.engine, on_fatal=self._on_fatal)
        self.loop.start()

    def _on_fatal(self, error: BaseException) -> None:
        self.fatal.append(error)
        self.dead.set()

    def finish_of(self, name: str, timeout_s: float = 20.0) -> FinishReason | None:
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            self.news.clear()
            events = self.engine.read(name, after=-1, term=1)
            if events and events[-1].finish:
                return events[-1].finish
            self.news.wait(1.0)
        return None


def make_request(name: str) -> Request:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    return Request(request_id=name, prompt=(1, 2), seed=0, version="v1", sampling=sampling)


def test_requests_from_other_threads_are_served_and_idle_does_not_spin() -> None:
    harness = Harness()
    for name in ("a", "b"):
        harness.engine.submit(make_request(name))
    assert harness.finish_of("a") is FinishReason.LENGTH
    assert harness.finish_of("b") is FinishReason.LENGTH
    cpu_s = time.process_time()
    harness.dead.wait(0.3)
    assert time.process_time() - cpu_s < 0.1
    harness.engine.submit(make_request("c"))
    assert harness.finish_of("c") is FinishReason.LENGTH
    assert harness.loop.stop(5.0)
    assert not harness.fatal


def test_an_unexpected_exception_ends_requests_and_is_reported() -> None:
    harness = Harness()

    def explode(work: Work) -> None:
        raise ZeroDivisionError("boom")

    harness.runner.fail = explode
    harness.engine.submit(make_request("a"))
    assert harness.dead.wait(10.0)
    assert harness.finish_of("a") is FinishReason.ERROR
    assert isinstance(harness.fatal[0], ZeroDivisionError)
    (event,) = harness.engine.read("a", after=-1, term=1)
    assert "boom" in str(event.error)


def test_a_fenced_stack_says_nothing_to_its_requests() -> None:
    harness = Harness()

    def fenced(work: Work) -> None:
        raise FencedError("term 1 is over")

    harness.runner.fail = fenced
    harness.engine.submit(make_request("a"))
    assert harness.dead.wait(10.0)
    assert harness.engine.read("a", after=-1, term=1) == []
