"""What a reader of the story sees, and what of Ray's own lines is kept from them."""

from __future__ import annotations

import os
import sys
import time

import pytest

from k3ray.cli.narrate import SILENCE_S, Narrator, without_ray_chatter
from k3ray.errors import K3RayError


def test_lines_of_ray_are_dropped_and_ours_kept(capsys: pytest.CaptureFixture[str]) -> None:
    with without_ray_chatter():
        print("first")
        print("\x1b[33m(raylet)\x1b[0m A worker died")
        print("(raylet) another one")
        print("second (raylet) is kept")
        print()
        print("last", end="")
        print("\x1b[33m(raylet)\x1b[0m A worker died", file=sys.stderr)
        print("INFO 2026-12-01 10:48:39,985 serve 77 -- Started Serve.", file=sys.stderr)
        print("error: INFO of ours", file=sys.stderr)
    seen = capsys.readouterr()
    assert seen.out == "first\nsecond (raylet) is kept\n\nlast"
    assert seen.err == "error: INFO of ours\n"


def test_silence_is_broken_within_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert SILENCE_S < 5.0
    with Narrator().phase("waiting"):
        time.sleep(SILENCE_S + 0.8)
    assert "... 4 s so far" in capsys.readouterr().out


def test_a_failed_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator()
    command = [sys.executable, "-c", "print('about to fail'); raise SystemExit(3)"]
    with pytest.raises(K3RayError, match="exited with 3"):
        narrator.run(command, env=os.environ, limit_s=30.0)
    assert "about to fail" in capsys.readouterr().out
