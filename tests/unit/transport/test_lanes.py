from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3ray.config.supernode import LaneConfig, LanesConfig
from k3ray.transport.lanes import LaneScheduler
from k3ray.transport.protocol import Lane

LANES = LanesConfig(
    serve=LaneConfig(min_share=0.3),
    score=LaneConfig(min_share=0.05),
    train=LaneConfig(min_share=0.1),
    quantum_s=0.02,
)


def run_saturated(
    lanes: LanesConfig, busy: set[Lane], piece_s: float, total_s: float
) -> list[Lane]:
    """Which lane each piece went to while every lane of `busy` always has work."""
    scheduler: LaneScheduler[str] = LaneScheduler(lanes)
    for lane in busy:
        scheduler.push(lane, lane.name)
    order: list[Lane] = []
    while len(order) * piece_s < total_s:
        picked = scheduler.pop()
        assert picked is not None
        lane, job = picked
        order.append(lane)
        scheduler.put_back(lane, job)
        scheduler.charge(lane, piece_s)
    return order


def share(order: list[Lane], lane: Lane) -> float:
    return order.count(lane) / len(order)


def test_first_in_first_out_within_a_lane_and_suspended_jobs_first() -> None:
    scheduler: LaneScheduler[int] = LaneScheduler(LANES)
    assert scheduler.pop() is None
    for job in range(3):
        scheduler.push(Lane.TRAIN, job)
    assert scheduler.pop() == (Lane.TRAIN, 0)
    scheduler.put_back(Lane.TRAIN, 0)
    scheduler.push(Lane.SERVE, 9)
    assert len(scheduler) == 4
    assert scheduler.pop() == (Lane.SERVE, 9)
    assert [scheduler.pop() for _ in range(4)] == [
        (Lane.TRAIN, 0), (Lane.TRAIN, 1), (Lane.TRAIN, 2), None,
    ]  # fmt: skip


def test_shares_under_saturation() -> None:
    order = run_saturated(LANES, set(Lane), piece_s=0.002, total_s=20.0)
    assert share(order, Lane.TRAIN) == pytest.approx(0.10, abs=0.02)
    assert share(order, Lane.SCORE) == pytest.approx(0.05, abs=0.01)
    assert share(order, Lane.SERVE) == pytest.approx(0.85, abs=0.03)


def test_an_owed_turn_is_at_most_one_quantum() -> None:
    order = run_saturated(LANES, {Lane.SERVE, Lane.TRAIN}, piece_s=0.002, total_s=20.0)
    turns = "".join("T" if lane is Lane.TRAIN else " " for lane in order).split()
    assert max(len(turn) for turn in turns) * 0.002 <= LANES.quantum_s + 0.002


def test_a_lane_alone_runs_freely_and_owes_nothing() -> None:
    scheduler: LaneScheduler[str] = LaneScheduler(LANES)
    for _ in range(1000):
        scheduler.push(Lane.TRAIN, "t")
        assert scheduler.pop() == (Lane.TRAIN, "t")
        scheduler.charge(Lane.TRAIN, 0.01)
    order = run_saturated(LANES, {Lane.SERVE, Lane.TRAIN}, piece_s=0.002, total_s=2.0)
    assert share(order, Lane.TRAIN) > 0.05


def test_no_share_no_turn() -> None:
    lanes = LanesConfig(
        serve=LaneConfig(min_share=0.0),
        score=LaneConfig(min_share=0.0),
        train=LaneConfig(min_share=0.0),
    )
    assert set(run_saturated(lanes, set(Lane), piece_s=0.005, total_s=5.0)) == {Lane.SERVE}


@settings(max_examples=30, deadline=None)
@given(
    shares=st.tuples(*[st.floats(0.02, 0.5)] * 3),
    piece_s=st.floats(0.0005, 0.02),
    busy=st.sets(st.sampled_from(list(Lane)), min_size=1),
)
def test_no_busy_lane_starves_whatever_the_shares(
    shares: tuple[float, float, float], piece_s: float, busy: set[Lane]
) -> None:
    configs = [LaneConfig(min_share=value) for value in shares]
    lanes = LanesConfig(serve=configs[0], score=configs[1], train=configs[2])
    order = run_saturated(lanes, busy, piece_s=piece_s, total_s=8.0)
    assert set(order) == busy
