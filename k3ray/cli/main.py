"""The `k3ray` command: a table of commands, each imported only when it is the one called.

`k3ray --help` and `config show` load neither torch nor Ray and answer in under a second. A
`K3RayError` becomes one line, `error[code]: message -> remedy`, and exit status 2; set
`K3RAY_TRACEBACK=1` to see where it came from. SIGTERM ends a command like Ctrl-C does: what it was
doing is put in order, and the exit status is 143 (130 after Ctrl-C).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import typer

from k3ray.cli.narrate import without_ray_chatter
from k3ray.errors import K3RayError

EXIT_ERROR = 2
EXIT_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """`target` is "module:attribute": a function, or a `typer.Typer` of subcommands."""

    target: str
    summary: str


COMMANDS: Mapping[str, Command] = {
    "up": Command(target="k3ray.cli.up_cmd:up", summary="Bring the supernode up on this machine."),
    "down": Command(
        target="k3ray.cli.down_cmd:down", summary="End the supernode and reap what is left."
    ),
    "status": Command(
        target="k3ray.cli.status_cmd:status", summary="Show actors, plan, versions, decisions."
    ),
    "serve": Command(
        target="k3ray.cli.serve_cmd:serve", summary="Serve HTTP from the live actors."
    ),
    "scale": Command(
        target="k3ray.cli.scale_cmd:scale",
        summary="Other numbers of groups and stacks, while serving.",
    ),
    "versions": Command(
        target="k3ray.cli.versions_cmd:versions",
        summary="List weight versions; answer by another one.",
    ),
    "chaos": Command(
        target="k3ray.cli.chaos_cmd:app", summary="Hit it on purpose; see what clients saw."
    ),
    "demo": Command(
        target="k3ray.cli.demo_cmd:demo", summary="Random k3-tiny endpoint with one kill, fast."
    ),
    "config": Command(
        target="k3ray.cli.config_cmd:app", summary="Show resolved configs and their digest."
    ),
    "checkpoint": Command(
        target="k3ray.cli.checkpoint_cmd:app",
        summary="Make, check, convert checkpoints in the release's layout.",
    ),
    "score": Command(
        target="k3ray.cli.score_cmd:score", summary="Log-probabilities of tokens, no cluster."
    ),
    "plan": Command(
        target="k3ray.cli.plan_cmd:plan", summary="What a model needs on N accelerators."
    ),
    "doctor": Command(
        target="k3ray.cli.doctor_cmd:doctor", summary="Check this machine, line by line."
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status (typer itself exits by `SystemExit`)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((text for text in arguments if not text.startswith("-")), None)
    terminated = threading.Event()

    def terminate(*_: object) -> NoReturn:
        terminated.set()
        raise SystemExit(EXIT_TERMINATED)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        with without_ray_chatter():  # around the import too: Serve's log takes its stream there
            build_app(chosen)(args=arguments, prog_name="k3ray")
    except K3RayError as error:
        if os.environ.get("K3RAY_TRACEBACK") == "1":
            raise
        typer.echo(error_text(error), err=True)
        return EXIT_ERROR
    except SystemExit:
        if terminated.is_set():  # Ray turns an exit inside its calls into one with status 1
            raise SystemExit(EXIT_TERMINATED) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def build_app(chosen: str | None) -> typer.Typer:
    """The application: `chosen` is really imported, the others are named by their summary."""
    app = typer.Typer(
        name="k3ray",
        help="One live Kimi-K3-shaped model in a Ray cluster: curate, train, serve.",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, command in COMMANDS.items():
        if name != chosen:
            app.command(name, help=command.summary)(_not_chosen)
            continue
        found = _load(command.target)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name, help=command.summary)
        else:
            app.command(name)(found)
    return app


def error_text(error: K3RayError) -> str:
    """`error[code]: message -> remedy` on the first line; further lines of a message follow.

    Reads the fields, not `str()`: Ray hands an actor's error over as a class of its own whose text
    is a traceback.
    """
    first, _, rest = error.message.partition("\n")
    line = f"error[{error.code}]: {first}" + (f" -> {error.remedy}" if error.remedy else "")
    return f"{line}\n{rest}" if rest else line


def _load(target: str) -> Callable[..., Any] | typer.Typer:
    module, _, attribute = target.partition(":")
    found: Callable[..., Any] | typer.Typer = getattr(importlib.import_module(module), attribute)
    return found


def _root() -> None:
    """Make `k3ray` a group even if it had one command."""


def _not_chosen() -> None:
    raise AssertionError("the command called is the command loaded")


if __name__ == "__main__":
    sys.exit(main())
