"""`k3ray up`: bring the supernode up on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from k3ray.cli.narrate import Narrator
from k3ray.cli.status_cmd import places
from k3ray.cli.supernode_args import home_from_environment, read_cluster, read_spec


def up(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of a SupernodeSpec")] = None,
    preset: Annotated[str | None, typer.Option(help="model preset, e.g. k3-nano")] = None,
    cluster: Annotated[str | None, typer.Option(help="YAML of the local Ray node")] = None,
) -> None:
    """Start Ray where needed, the controller, expert groups and attention stacks."""
    spec = read_spec(config, overrides or [], preset)
    local, narrator = read_cluster(cluster), Narrator()
    left = "`k3ray status` says what is up; `k3ray down` ends it"
    with narrator.interruptible(left), narrator.phase("bringing the supernode up"):
        from k3ray.actors.supernode import ensure_up

        supernode = ensure_up(spec, home_from_environment(), local, say=narrator.say)
    typer.echo(f"supernode {supernode.info.name!r} is up")
    for line in places(supernode, supernode.call("status", limit_s=30.0)):
        typer.echo(line)
    typer.echo("next: `k3ray serve` for HTTP, `k3ray status` to look, `k3ray down` to end it")
