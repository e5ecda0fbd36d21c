"""`k3ray scale`: another number of attention stacks, while requests go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3ray.cli.narrate import Narrator, without_ray_chatter
from k3ray.cli.supernode_args import home_from_environment
from k3ray.clock import Deadline

if TYPE_CHECKING:
    from k3ray.actors.supernode import Supernode


def scale(
    stacks: Annotated[int, typer.Option(help="attention stacks from now on")],
) -> None:
    """Start or drain attention stacks. Open requests go on with the same tokens; a new stack that
    does not come to serve is taken back."""
    from k3ray.actors.supernode import connect

    narrator = Narrator()
    with without_ray_chatter(), narrator.phase(f"scaling to {stacks} stacks"):
        supernode = connect(home_from_environment())
        asked = supernode.call("scale", stacks)
        deadlines = supernode.call("spec").deadlines
        limit_s = 2 * (deadlines.start_s + deadlines.rebuild_s + deadlines.drain_s)
        deadline = Deadline.after(limit_s, operation="scale", peer="controller")
        scaling = _until_done(supernode, deadline)
    changed = asked["previous"] != stacks
    typer.echo(
        f"{scaling['stacks']} stacks" + (f": {scaling['reason']}" if changed else " already")
    )
    if scaling["stacks"] != stacks:
        raise typer.Exit(1)


def _until_done(supernode: Supernode, deadline: Deadline) -> dict[str, Any]:
    while True:
        scaling: dict[str, Any] = supernode.call("status")["scaling"]
        if not scaling["under_way"]:
            return scaling
        deadline.check()
        time.sleep(0.2)
