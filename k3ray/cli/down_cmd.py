"""`k3ray down`: end the supernode, its endpoint and its Ray cluster, and reap what is left."""

from __future__ import annotations

import typer

from k3ray.cli.supernode_args import home_from_environment


def down() -> None:
    """End everything of this home; weights and journal stay on disk. Safe in any state."""
    from k3ray.actors.supernode import down as end

    left = end(home_from_environment(), say=typer.echo)
    if left:
        typer.echo(f"still alive after SIGKILL: {left}", err=True)
        raise typer.Exit(1)
    typer.echo("down: no process, socket or shared memory left")
