"""`WorkerServer`: the life of a server, whatever carries its messages.

One worker thread takes messages in, runs its owner's control work and serves one piece of a
request, over and over, until it is closed.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from k3ray.clock import Deadline
from k3ray.ids import Incarnation
from k3ray.transport.control_queue import ControlQueue
from k3ray.transport.protocol import Lane
from k3ray.transport.server_core import LaneCounters, ServerCore

CLOSE_LIMIT_S = 10.0
"""How long `close` waits for the piece of work that is running."""

_log = logging.getLogger("k3ray.transport")


class WorkerServer(ABC):
    """A `Server`; a subclass carries the messages.

    Args:
        me: This incarnation.
        core: Its requests.
        endpoint: Where clients connect.
    """

    def __init__(self, me: Incarnation, core: ServerCore, endpoint: str) -> None:
        self._core = core
        self._endpoint = endpoint
        self._control = ControlQueue(self._wake)
        self._closing = False
        self._close_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=f"worker-{me}", daemon=True)

    @property
    def endpoint(self) -> str:
        """Where clients connect."""
        return self._endpoint

    @property
    def counters(self) -> Mapping[Lane, LaneCounters]:
        """Live counters by lane; read only."""
        return self._core.counters

    def run_in_worker(self, work: Callable[[], object], deadline: Deadline) -> object:
        """Run `work` on the worker thread; see `ControlQueue.call`."""
        return self._control.call(work, deadline)

    def close(self) -> None:
        """Stop, answering what waits with `PeerLostError`, and remove the endpoint; idempotent.

        Raises:
            DeadlineError: the running piece of work did not end; the endpoint stays until it does.
        """
        with self._close_lock:
            if self._closing and not self._thread.is_alive():
                return
            deadline = Deadline.after(CLOSE_LIMIT_S, operation="close", peer=self._endpoint)
            self._closing = True
            self._wake()
            self._thread.join(deadline.left_s())
            if self._thread.is_alive():
                raise deadline.error("the handler's running piece of work is stuck")
            self._release()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_in(block=not self._core.has_work())
                self._control.run_pending()
                self._core.step()
        except Exception:
            # Nobody waits for this thread; the lost connections tell every client.
            _log.exception("event=transport.worker_died endpoint=%s", self._endpoint)
        finally:
            self._closing = True
            self._control.close()
            self._core.shutdown()
            self._disconnect()

    @abstractmethod
    def _take_in(self, *, block: bool) -> None:
        """Hand what has arrived to the core; with `block`, wait for something or for `_wake`."""

    @abstractmethod
    def _wake(self) -> None:
        """End a blocking `_take_in`; any thread."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Tell every client that this life is over; the worker thread's last act."""

    @abstractmethod
    def _release(self) -> None:
        """Give back the endpoint and what `_wake` needs; after the thread has ended."""
