"""`k3ray scale`: other numbers of expert groups and attention stacks, while requests go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3ray.cli.narrate import Narrator
from k3ray.cli.supernode_args import home_from_environment
from k3ray.clock import Deadline

if TYPE_CHECKING:
    from k3ray.actors.supernode import Supernode


def scale(
    groups: Annotated[int | None, typer.Option(min=1, help="expert groups from now on")] = None,
    stacks: Annotated[int | None, typer.Option(min=1, help="attention stacks from now on")] = None,
) -> None:
    """Start or end expert groups and attention stacks. Open requests go on with the same tokens;
    experts move as little as an even share allows; a change that fails is taken back."""
    if groups is None and stacks is None:
        raise typer.BadParameter("say what to change: --groups N, --stacks N, or both")
    wanted = ", ".join(f"{n} {what}" for n, what in ((groups, "groups"), (stacks, "stacks")) if n)
    narrator = Narrator()
    left = "the change goes on; `k3ray status --json` has it under `scaling`"
    with narrator.interruptible(left), narrator.phase(f"scaling to {wanted}"):
        from k3ray.actors.supernode import connect

        supernode = connect(home_from_environment())
        asked = supernode.call("scale", groups, stacks)
        deadlines = supernode.call("spec").deadlines
        limit_s = 2 * (deadlines.start_s + deadlines.rebuild_s + deadlines.drain_s)
        deadline = Deadline.after(limit_s, operation="scale", peer="controller")
        scaling = _until_done(supernode, deadline)
    size = f"{scaling['groups']} groups, {scaling['stacks']} stacks"
    if asked["size"] == asked["previous"]:
        typer.echo(f"{size} already")
    elif scaling["failure"]:
        typer.echo(f"{size}, taken back: {scaling['failure']}")
        raise typer.Exit(1)
    else:
        moved = f"; {asked['loads']} experts per layer moved" if asked["loads"] else ""
        typer.echo(f"{size}{moved}")


def _until_done(supernode: Supernode, deadline: Deadline) -> dict[str, Any]:
    while True:
        scaling: dict[str, Any] = supernode.poll_status(deadline)["scaling"]
        if not scaling["under_way"]:
            return scaling
        deadline.check()
        time.sleep(0.2)
