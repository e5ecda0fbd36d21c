"""Progress for people: one line per event, and a sign of life at least every five seconds.

`Narrator` stamps every line with the seconds since the start. `phase` names what is being waited
for; while it lasts and nothing else is said, a line repeats the name and how long it has taken.
"""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TextIO

import typer

from k3ray.errors import K3RayError

SILENCE_S = 4.0
_RAY_CHATTER = re.compile(
    r"^\d{4}-\d\d-\d\d .*\b(INFO|SUCC) \w+\.py:\d+ -- |^(\x1b\[\d+m)?\(raylet\)"
    r"|^(\x1b\[\d+m)?INFO \d{4}-\d\d-\d\d [\d:,]+ serve \d+ -- "
)
"""Lines of Ray's own clients that tell a reader of the story nothing."""


class _WithoutChatter(io.TextIOBase):
    """A stream that drops what Ray prints into its driver's; `print` writes a line, then its end.

    Ray offers no switch for it: `log_to_driver=False` silences the workers' lines only.
    """

    def __init__(self, inner: TextIO) -> None:
        self._inner = inner
        self._dropped = threading.local()

    def write(self, text: str) -> int:
        if _RAY_CHATTER.search(text):
            self._dropped.line = not text.endswith("\n")
        elif getattr(self._dropped, "line", False) and text == "\n":
            self._dropped.line = False
        else:
            self._inner.write(text)
        return len(text)

    def flush(self) -> None:
        self._inner.flush()

    def isatty(self) -> bool:
        return self._inner.isatty()


@contextmanager
def without_ray_chatter() -> Iterator[None]:
    """Keep what Ray prints by itself out of stdout and stderr for a block."""
    out, err = _WithoutChatter(sys.stdout), _WithoutChatter(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        yield


class Narrator:
    """Prints stamped lines; thread-safe."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._said_s = self._started_s
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def say(self, text: str) -> None:
        """Print one line."""
        with self._lock:
            self._said_s = time.monotonic()
            typer.echo(f"[{self.elapsed_s:6.1f} s] {text}")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Say `name`, keep saying it while nothing else is said, and how long it took."""
        self.say(name)
        started_s, over = time.monotonic(), threading.Event()

        def keep_talking() -> None:
            while not over.wait(0.5):
                if time.monotonic() - self._said_s >= SILENCE_S:
                    self.say(f"... {time.monotonic() - started_s:.0f} s so far")

        thread = threading.Thread(target=keep_talking, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        self.say(f"{name}: done in {time.monotonic() - started_s:.1f} s")

    @contextmanager
    def interruptible(self, then: str) -> Iterator[None]:
        """On Ctrl-C or SIGTERM say what state things are in, then end with that status."""
        try:
            yield
        except KeyboardInterrupt:
            self.say(f"interrupted: {then}")
            raise SystemExit(128 + signal.SIGINT) from None
        except SystemExit:
            self.say(f"interrupted: {then}")
            raise

    def run(self, command: Sequence[str], *, env: Mapping[str, str], limit_s: float) -> list[str]:
        """Run a command, repeat its output line by line, and return it.

        Raises:
            K3RayError: it failed or took longer than `limit_s` (it is ended then).
        """
        lines: list[str] = []
        with subprocess.Popen(
            list(command), env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, errors="replace",
        ) as process:  # fmt: skip
            timer = threading.Timer(limit_s, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    lines.append(line.rstrip())
                    if line.strip() and not _RAY_CHATTER.search(line):
                        self.say(line.rstrip())
                code = process.wait()
            except BaseException:
                process.kill()
                raise
            finally:
                timed_out = not timer.is_alive()
                timer.cancel()
        if code != 0:
            reason = f"was ended after {limit_s:g} s" if timed_out else f"exited with {code}"
            raise K3RayError(
                f"{' '.join(command)} {reason}", remedy="see the lines above", exit_code=code
            )
        return lines
