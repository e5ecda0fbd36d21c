"""Which request a group's worker runs next: strict priority with a minimum share for each lane.

Pure: jobs and seconds go in, the next job comes out. The caller runs one short piece, charges its
time, puts an unfinished job back and asks again, so a higher lane waits for one piece at most. A
waiting lane is owed `min_share` of the time that others use; when that amounts to a turn of
`quantum_s`, it runs for one, whatever else waits.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from k3ray.config.supernode import LaneConfig, LanesConfig
from k3ray.transport.protocol import Lane

Job = TypeVar("Job")


def lane_configs(lanes: LanesConfig) -> tuple[LaneConfig, ...]:
    """Configs in the order of `Lane`."""
    return (lanes.serve, lanes.score, lanes.train)


class LaneScheduler(Generic[Job]):
    """Queues per lane; first in, first out within a lane. Bounded by whoever grants credits."""

    def __init__(self, lanes: LanesConfig) -> None:
        self._shares = tuple(config.min_share for config in lane_configs(lanes))
        self._quantum_s = lanes.quantum_s
        self._queues: tuple[deque[Job], ...] = tuple(deque() for _ in Lane)
        self._by_lane = tuple(zip(Lane, self._queues, strict=True))
        self._owed_s = [0.0 for _ in Lane]
        self._turn: Lane | None = None
        self._num_jobs = 0
        self._last_turn = [0 for _ in Lane]

    def __len__(self) -> int:
        return self._num_jobs

    def push(self, lane: Lane, job: Job) -> None:
        """Add a new job behind the others of its lane."""
        self._queues[lane].append(job)
        self._num_jobs += 1

    def put_back(self, lane: Lane, job: Job) -> None:
        """Return an unfinished job; it is the next of its lane."""
        self._queues[lane].appendleft(job)
        self._num_jobs += 1

    def pop(self) -> tuple[Lane, Job] | None:
        """Take the next job, or None when nothing waits."""
        ready = [lane for lane, queue in self._by_lane if queue]
        if not ready:
            return None
        lane = ready[0] if len(ready) == 1 else self._choose(ready)
        self._num_jobs -= 1
        return lane, self._queues[lane].popleft()

    def charge(self, lane: Lane, busy_s: float) -> None:
        """Account `busy_s` seconds just spent on `lane`; call before `put_back`."""
        if self._turn is lane:
            self._owed_s[lane] -= busy_s * (1.0 - self._shares[lane])
        for other, queue in self._by_lane:
            if queue and other is not lane:
                owed_s = self._owed_s[other] + busy_s * self._shares[other]
                self._owed_s[other] = min(owed_s, self._turn_price_s(other))

    def _choose(self, ready: list[Lane]) -> Lane:
        if self._turn in ready and self._owed_s[self._turn] > 0.0:
            return self._turn
        entitled = [lane for lane in ready if self._owed_s[lane] >= self._turn_price_s(lane)]
        if not entitled:
            self._turn = None
            return ready[0]
        # Whose last turn is longest ago, or shares that sum to one would starve the last lane.
        self._turn = min(entitled, key=self._last_turn.__getitem__)
        self._last_turn[self._turn] = max(self._last_turn) + 1
        return self._turn

    def _turn_price_s(self, lane: Lane) -> float:
        # A lane without a share is never owed a turn.
        share = self._shares[lane]
        return self._quantum_s * (1.0 - share) if share > 0.0 else float("inf")
