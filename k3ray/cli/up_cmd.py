"""`k3ray up`: bring the supernode up on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from k3ray.cli.narrate import Narrator
from k3ray.cli.status_cmd import places
from k3ray.cli.supernode_args import home_from_environment, read_cluster, read_spec
from k3ray.config.home import Home
from k3ray.config.resolve import resolve_tokenizer
from k3ray.config.supernode import SupernodeSpec

if TYPE_CHECKING:
    from k3ray.actors.supernode import Supernode


def up(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of a SupernodeSpec")] = None,
    preset: Annotated[str | None, typer.Option(help="model preset, e.g. k3-nano")] = None,
    cluster: Annotated[str | None, typer.Option(help="YAML of the local Ray node")] = None,
    *,
    resume: Annotated[
        bool, typer.Option("--resume", help="what was up last, by the same config")
    ] = False,
) -> None:
    """Start Ray where needed, the controller, expert groups and attention stacks. With --resume
    bring up again what was up last, with its endpoint, its size and its weights, after a crash
    or a reboot; what is left of it is ended first."""
    home, narrator = home_from_environment(), Narrator()
    left = "`k3ray status` says what is up; `k3ray down` ends it"
    if resume:
        if overrides or config or preset or cluster:
            raise typer.BadParameter("--resume takes no config: it brings up what was up last")
        with narrator.interruptible(left):
            supernode = _resume(home, narrator)
    else:
        spec, local = read_spec(config, overrides or [], preset), read_cluster(cluster)
        check_tokenizer(spec)
        with narrator.interruptible(left), narrator.phase("bringing the supernode up"):
            from k3ray.actors.supernode import ensure_up

            supernode = ensure_up(spec, home, local, say=narrator.say)
    typer.echo(f"supernode {supernode.info.name!r} is up")
    for line in places(supernode, supernode.call("status", limit_s=30.0)):
        typer.echo(line)
    typer.echo("next: `k3ray serve` for HTTP, `k3ray status` to look, `k3ray down` to end it")


def check_tokenizer(spec: SupernodeSpec) -> None:
    """Refuse a tokenizer that is there and is none; one that is not there yet may be curated.

    Raises:
        DataError: the file is no tokenizer.
    """
    file = resolve_tokenizer(spec)
    if file is not None and Path(file).exists():
        from k3ray.text.tokenizer import K3Tokenizer

        K3Tokenizer.load(file)


def _resume(home: Home, narrator: Narrator) -> Supernode:
    with narrator.phase("bringing up what was up last"):
        from k3ray.actors.supernode import resume

        supernode, last = resume(home, say=narrator.say)
    if last.port is not None:
        with narrator.phase(f"deploying the endpoint on port {last.port}"):
            from k3ray.serve.app import deploy

            deploy(supernode, port=last.port)
    return supernode
