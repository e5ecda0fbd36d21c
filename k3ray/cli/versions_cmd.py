"""`k3ray versions`: weight versions, live and stored; and which of them to answer by."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from k3ray.cli.narrate import Narrator
from k3ray.cli.supernode_args import home_from_environment


def versions(
    use: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="answer by this stored version from now on"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="the list as JSON")] = False,
) -> None:
    """List the line's weight versions. With --use a stored one becomes the latest: a roll-back, or
    forward again. Open requests keep theirs; a version that cannot be loaded leaves the old one."""
    from k3ray.actors.supernode import connect

    supernode = connect(home_from_environment())
    if use is not None:
        narrator = Narrator()
        left = "the change goes on; `k3ray versions` lists what is live"
        with narrator.interruptible(left), narrator.phase(f"loading {use}"):
            deadlines = supernode.call("spec").deadlines
            limit_s = deadlines.prepare_s + 2 * deadlines.rebuild_s + 10.0
            supernode.call("use_version", use, limit_s=limit_s)
    info = supernode.call("weight_info")
    typer.echo(json.dumps(info, indent=2) if as_json else "\n".join(render(info)))


def render(info: dict[str, Any]) -> list[str]:
    """The list as lines of text, newest step first."""
    live = {v["version"]: v for v in info["live"]}
    lines = [
        f"line {info['line']}, at most {info['max_live_versions']} live beside one another",
        f"{'version':32} {'step':>8} {'state':8} {'pins':>5} {'MB':>9} written",
    ]
    for entry in reversed(info["stored"]):
        state = live.get(entry["version"], {"state": "stored", "pins": 0})
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry["created_unix_s"]))
        lines.append(
            f"{entry['version']:32} {entry['step']:>8} {state['state']:8} {state['pins']:>5} "
            f"{entry['size_bytes'] / 1e6:>9.1f} {written}"
        )
    lines += [f"damaged: {name}: {reason}" for name, reason in info["damaged"].items()]
    return lines
