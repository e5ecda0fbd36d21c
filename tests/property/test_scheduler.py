"""The scheduler never overcommits, every admitted sequence ends, chunks are aligned."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.config.supernode import EngineConfig
from k3ray.engine.blocks import StatePool
from k3ray.engine.request import Request, SamplingParams
from k3ray.engine.scheduler import Scheduler
from k3ray.engine.sequence import Sequence, new_sequence
from k3ray.errors import CapacityError, ContextLengthError

EOS = 511
CONTEXT = 1024


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    running = draw(st.integers(1, 6))
    return EngineConfig(
        max_running=running,
        max_waiting=draw(st.integers(0, 6)),
        num_pages=draw(st.integers(1, 24)),
        prefill_chunk_tokens=64 * draw(st.integers(1, 4)),
        step_token_budget=running + 64 + draw(st.integers(0, 300)),
    )


arrivals = st.lists(
    st.tuples(st.integers(1, 700), st.integers(1, 30), st.booleans()), min_size=1, max_size=20
)


def new(index: int, prompt: int, max_tokens: int) -> Sequence:
    request = Request(
        request_id=f"r{index}",
        prompt=(1,) * prompt,
        seed=0,
        version="v",
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    return new_sequence(request, eos_token_id=EOS)


def play_step(scheduler: Scheduler, config: EngineConfig) -> list[Sequence]:
    """Run one step as the engine would; returns the sequences that ended."""
    spans = scheduler.schedule()
    assert sum(span.length for span in spans) <= config.step_token_budget
    assert len({id(span.sequence) for span in spans}) == len(spans)
    if scheduler.running:
        oldest = scheduler.running[0]
        assert any(span.sequence is oldest for span in spans), "the oldest sequence must move"
    ended = []
    for span in spans:
        sequence = span.sequence
        assert span.start == sequence.computed
        assert 1 <= span.length <= max(1, config.prefill_chunk_tokens)
        end = span.start + span.length
        assert span.samples == (end == len(sequence.tokens))
        assert span.samples or end % 64 == 0
        assert span.length == 1 or span.start % 64 == 0
        sequence.computed = end
        if span.samples:
            sequence.append(2)
            if sequence.natural_end():
                ended.append(sequence)
    for sequence in ended:
        scheduler.remove(sequence)
    return ended


def check_pool(scheduler: Scheduler, pool: StatePool, config: EngineConfig) -> None:
    holdings = [s.holding for s in scheduler.running]
    assert all(holding is not None for holding in holdings)
    pages = [page for holding in holdings if holding for page in holding.pages]
    slots = [holding.slot for holding in holdings if holding]
    assert len(set(pages)) == len(pages)
    assert len(set(slots)) == len(slots) <= config.max_running
    assert len(pages) + pool.free_pages == config.num_pages
    assert len(slots) + pool.free_slots == config.max_running
    for sequence in scheduler.running:
        assert sequence.holding is not None
        assert len(sequence.holding.pages) * 64 >= len(sequence.tokens)


@settings(max_examples=150, deadline=None)
@given(config=configs(), arriving=arrivals)
def test_every_accepted_sequence_ends_in_order_and_frees_everything(
    config: EngineConfig, arriving: list[tuple[int, int, bool]]
) -> None:
    pool = StatePool(
        num_slots=config.max_running, num_pages=config.num_pages, zero=lambda slot, pages: None
    )
    scheduler = Scheduler(config, pool, max_context=CONTEXT)
    accepted: list[Sequence] = []
    admitted: list[Sequence] = []
    ended: list[Sequence] = []

    def step() -> None:
        ended.extend(play_step(scheduler, config))
        admitted.extend(s for s in accepted if s.computed and s not in admitted)
        check_pool(scheduler, pool, config)

    for index, (prompt, max_tokens, step_now) in enumerate(arriving):
        sequence = new(index, prompt, max_tokens)
        try:
            scheduler.check(sequence, retry_after_s=1.0)
        except ContextLengthError:
            assert prompt + max_tokens > min(CONTEXT, 64 * config.num_pages - 63)
            continue
        except CapacityError:
            open_now = len(scheduler.running) + len(scheduler.waiting)
            assert open_now == config.max_running + config.max_waiting
            continue
        scheduler.enqueue(sequence)
        accepted.append(sequence)
        if step_now:
            step()
    bound = sum(len(s.tokens) + s.request.sampling.max_tokens for s in accepted) + 1
    for _ in range(bound):
        if not (scheduler.running or scheduler.waiting):
            break
        step()
    assert len(ended) == len(accepted)
    assert (pool.free_slots, pool.free_pages) == (config.max_running, config.num_pages)
    # First come, first served: a later arrival never starts before an earlier one was admitted.
    order = [accepted.index(s) for s in admitted]
    assert sorted(order) == list(range(len(accepted)))
