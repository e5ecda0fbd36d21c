"""`EngineLoop`: the one thread that steps an engine, and what happens when it cannot go on.

It sleeps on the engine's condition when idle. It never dies silently: an unexpected exception is
logged, ends every open request with an error, and is handed to `on_fatal`. A `FencedError` goes
to `on_fatal` at once and no request is told: another life of this stack already serves them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from k3ray.engine.engine import Engine
from k3ray.errors import FencedError, K3RayError
from k3ray.obs.log import get_log

_IDLE_WAIT_S = 1.0

_log = get_log(__name__)


class EngineLoop:
    """Runs `engine.step` until stopped.

    Args:
        engine: Stepped by this loop only.
        on_fatal: Called on the loop's thread when it ends by an exception.
    """

    def __init__(self, engine: Engine, *, on_fatal: Callable[[BaseException], None]) -> None:
        self._engine = engine
        self._on_fatal = on_fatal
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop after the current step; returns whether the thread ended in time."""
        self._stopping.set()
        self._engine.wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                if not self._engine.step():
                    self._engine.wait_for_work(_IDLE_WAIT_S)
        except FencedError as error:
            _log.error("engine.fenced", reason=str(error))
            self._on_fatal(error)
        except BaseException as error:
            _log.error("engine.failed", error=error)
            self._engine.fail_all(
                K3RayError(
                    f"the engine failed: {type(error).__name__}: {error}",
                    remedy="retry the request; the stack is being rebuilt",
                )
            )
            self._on_fatal(error)
