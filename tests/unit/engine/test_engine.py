"""The engine on a fake runner: tokens, continuation, doors, numeric faults."""

from __future__ import annotations

import pytest
from engine_cases import (
    CONFIG,
    TEXT,
    assert_all_free,
    drain,
    events,
    make_engine,
    make_request,
    replace_config,
    run,
)

from k3ray.engine.request import FinishReason, SamplingParams
from k3ray.errors import (
    BadRequestError,
    CapacityError,
    ContextLengthError,
    FencedError,
    StaleVersionError,
)


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
