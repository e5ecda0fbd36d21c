"""`k3ray serve`: the OpenAI-compatible endpoint and the web page, on the live actors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli.narrate import Narrator
from k3ray.cli.supernode_args import home_from_environment, read_cluster, read_spec
from k3ray.weights.checkpoint import Checkpoint


def serve(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of a SupernodeSpec")] = None,
    preset: Annotated[str | None, typer.Option(help="model preset, e.g. k3-nano")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port (default: the spec's, 8000)")
    ] = None,
    *,
    checkpoint: Annotated[
        Path | None, typer.Option(help="serve this checkpoint in the release's layout")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="YAML of the local Ray node")] = None,
) -> None:
    """Deploy the endpoint; brings the supernode up first when it is not."""
    if checkpoint is not None:
        Checkpoint.open(checkpoint)  # refused here, before anything is started
    home, local, narrator = home_from_environment(), read_cluster(cluster), Narrator()
    chosen = [*(overrides or []), *([f"checkpoint={checkpoint.absolute()}"] if checkpoint else [])]
    left = "`k3ray serve` goes on from here, `k3ray down` ends everything"
    with narrator.interruptible(left):
        with narrator.phase("bringing the supernode up"):
            from k3ray.actors.supernode import connect, ensure_up, is_up
            from k3ray.serve.app import check_port_free, deploy

            up = is_up(home)
            if up and config is None and preset is None and not chosen:
                supernode = connect(home)
            else:
                spec = read_spec(config, chosen, preset)
                if not up:  # a refused port is said now, not after the start
                    check_port_free(spec.endpoint.host, port or spec.endpoint.port)
                supernode = ensure_up(spec, home, local, say=narrator.say)
        with narrator.phase("deploying the endpoint"):
            url = deploy(supernode, port=port)
    typer.echo(f"serving at {url}/v1 (page: {url}/ui, health: {url}/health)")
