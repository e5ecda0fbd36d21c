"""One choice across dying stacks: the same tokens, each exactly once; old terms are refused."""

from __future__ import annotations

import asyncio

import pytest

from k3ray.clock import Deadline
from k3ray.engine.request import FinishReason, Request, SamplingParams, TokenEvent
from k3ray.errors import CapacityError, DeadlineError, NumericError, SupernodeError
from k3ray.serve.generation import Generation, GenerationLimits, Ledger
from tests.support.scripted_router import VERSION, ScriptedRouter, scripted_token

NUM_TOKENS = 9


def request(**fields: object) -> Request:
    base = {"request_id": "r", "prompt": (1, 2), "seed": 5, "version": VERSION}
    return Request(**{**base, "sampling": SamplingParams(max_tokens=NUM_TOKENS), **fields})  # type: ignore[arg-type]


def generation(
    router: ScriptedRouter, asked: Request | None = None, *, limit_s: float = 20.0, **limits: float
) -> Generation:
    return Generation(
        asked or request(),
        router,
        affinity=0,
        deadline=Deadline.after(limit_s, operation="test", peer="test"),
        limits=GenerationLimits(**{"poll_wait_s": 0.5, "answer_s": 0.5, "stack_s": 5.0, **limits}),
    )


def run(router: ScriptedRouter, asked: Request | None = None) -> tuple[list[int], Generation]:
    async def go() -> tuple[list[int], Generation]:
        made = generation(router, asked)
        await made.start()
        return [e.token async for e in made.events() if e.token is not None], made

    return asyncio.run(go())


EXPECTED = [scripted_token(request(), position) for position in range(NUM_TOKENS)]


@pytest.mark.parametrize("num_stacks", [1, 2])
@pytest.mark.parametrize("kill_at", range(NUM_TOKENS))
@pytest.mark.parametrize("step", [1, 4])
def test_a_kill_at_any_position_changes_nothing(kill_at: int, num_stacks: int, step: int) -> None:
    router = ScriptedRouter(num_stacks=num_stacks, kill_at={kill_at}, step=step)
    killed = kill_at % step == 0
    tokens, made = run(router)
    assert tokens == EXPECTED
    assert made.handovers == int(killed)
    assert [r.term for r in router.submitted] == ([1, 2] if killed else [1])
    if killed:
        assert router.submitted[-1].emitted == tuple(EXPECTED[:kill_at])


def test_a_kill_at_every_position_of_one_request() -> None:
    router = ScriptedRouter(num_stacks=2, kill_at=set(range(NUM_TOKENS)))
    tokens, made = run(router)
    assert tokens == EXPECTED
    assert made.handovers == NUM_TOKENS
    terms = [r.term for r in router.submitted]
    assert terms == sorted(set(terms)), "every hand-over has a higher term"


def test_a_continued_request_starts_after_its_emitted_tokens() -> None:
    tokens, _ = run(ScriptedRouter(), request(emitted=tuple(EXPECTED[:4])))
    assert tokens == EXPECTED[4:]


def test_ledger_takes_only_the_next_position_of_the_current_term() -> None:
    ledger = Ledger()
    events = [TokenEvent(position=i, token=i) for i in range(4)]
    assert ledger.accept(1, [events[1]]) == []
    assert ledger.accept(1, events[:2]) == events[:2]
    assert ledger.accept(1, events[:2]) == []
    assert ledger.reopen() == 2
    assert ledger.accept(1, [events[2]]) == [], "a late event of the old term"
    assert ledger.accept(2, [events[2]]) == [events[2]]
    assert ledger.tokens == [0, 1, 2]
    assert ledger.refused == 4


def test_ledger_takes_nothing_after_the_end() -> None:
    ledger = Ledger()
    end = TokenEvent(position=0, token=7, finish=FinishReason.STOP)
    assert ledger.accept(1, [end, TokenEvent(position=1, token=8)]) == [end]
    assert ledger.tokens == [7]


def test_a_stack_that_never_answers_is_left() -> None:
    class Deaf(ScriptedRouter):
        async def poll(self, stack, request_id, **asked):  # type: ignore[no-untyped-def]
            if stack.actor == "stack-0":
                await asyncio.Event().wait()
            return await super().poll(stack, request_id, **asked)

    async def go() -> list[int | None]:
        made = generation(router, poll_wait_s=0.01, answer_s=0.05)
        await made.start()
        return [event.token async for event in made.events()]

    router = Deaf(num_stacks=2)
    assert asyncio.run(go()) == EXPECTED
    assert [str(stack) for stack in router.lost] == ["stack-0#1"]


def test_a_first_submission_to_a_full_stack_is_refused_at_once() -> None:
    with pytest.raises(CapacityError):
        run(ScriptedRouter(capacity=0))


def test_no_stack_ends_at_the_deadline() -> None:
    async def go() -> None:
        await generation(ScriptedRouter(num_stacks=0), stack_s=0.05).start()

    with pytest.raises(DeadlineError, match="ready attention stack"):
        asyncio.run(go())


def test_the_request_deadline_ends_a_silent_request() -> None:
    async def go() -> None:
        router = ScriptedRouter(step=0)
        made = generation(router, limit_s=0.1, poll_wait_s=0.01)
        await made.start()
        async for _ in made.events():
            pass

    with pytest.raises(DeadlineError, match="test"):
        asyncio.run(go())


def _ending(error: str | None, finish: FinishReason, times: int) -> ScriptedRouter:
    class Ending(ScriptedRouter):
        def events(self, asked: Request, after: int) -> list[TokenEvent]:
            if after == 3 and asked.term <= times:
                return [TokenEvent(position=4, token=None, finish=finish, error=error)]
            return super().events(asked, after)

    return Ending()


def test_an_aborted_request_goes_on() -> None:
    tokens, made = run(_ending(None, FinishReason.ABORTED, 2))
    assert tokens == EXPECTED
    assert made.handovers == 2


def test_a_failed_stack_is_another_try_but_nan_is_not() -> None:
    limits = {"stack_s": 5.0, "answer_s": 0.05}

    async def go(router: ScriptedRouter) -> list[int | None]:
        made = generation(router, **limits)
        await made.start()
        return [event.token async for event in made.events()]

    failed = _ending("transport: a group was gone", FinishReason.ERROR, 1)
    assert asyncio.run(go(failed)) == EXPECTED
    with pytest.raises(NumericError):
        asyncio.run(go(_ending("numeric: NaN in logits", FinishReason.ERROR, 1)))


def test_endless_hand_overs_end() -> None:
    with pytest.raises(SupernodeError, match="without a new token"):
        run(_ending(None, FinishReason.ABORTED, 10**6))
