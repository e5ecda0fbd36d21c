"""Control work of the server's owner, run on the worker thread between pieces of requests."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

from k3ray.clock import Deadline
from k3ray.errors import CapacityError, PeerLostError

MAX_WAITING = 64


class ControlQueue:
    """Bounded queue of calls into the worker thread.

    Args:
        wake: Makes a waiting worker thread call `run_pending`; thread-safe.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[object], Callable[[], object]]] = deque()
        self._worker: int | None = None
        self._closed = False

    def call(self, work: Callable[[], object], deadline: Deadline) -> object:
        """Run `work` on the worker thread; any thread may call, the worker's own included.

        Raises:
            DeadlineError: not finished in time; work that had not begun never will.
            CapacityError: too many calls wait.
            PeerLostError: the server is closed.
            Exception: whatever `work` raises.
        """
        if threading.get_ident() == self._worker:
            return work()
        future: Future[object] = Future()
        with self._lock:
            if self._closed:
                raise _closed(deadline)
            if len(self._waiting) >= MAX_WAITING:
                raise CapacityError(
                    f"{MAX_WAITING} control calls wait for {deadline.peer}",
                    remedy="wait until earlier ones have ended",
                    retry_after_s=1.0,
                )
            self._waiting.append((future, work))
            # Under the lock, so that the owner's wake-up handle cannot be closed in between.
            self._wake()
        finished, _ = wait([future], deadline.left_s())
        if not finished:
            future.cancel()
            raise deadline.error()
        if future.cancelled():
            raise _closed(deadline)
        return future.result()

    def run_pending(self) -> None:
        """Run everything that waits; worker thread only."""
        self._worker = threading.get_ident()
        while self._waiting:
            future, work = self._waiting.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # belongs to the caller, who waits for it
                future.set_exception(error)

    def close(self) -> None:
        """Refuse new calls and cancel those that wait."""
        with self._lock:
            self._closed = True
            while self._waiting:
                future, _ = self._waiting.popleft()
                future.cancel()
                future.set_running_or_notify_cancel()


def _closed(deadline: Deadline) -> PeerLostError:
    return PeerLostError(
        f"{deadline.operation}: the server of {deadline.peer} is closed",
        remedy="ask the controller for the current incarnation",
        peer=deadline.peer,
        operation=deadline.operation,
    )
