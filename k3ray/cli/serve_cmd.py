"""`k3ray serve`: the OpenAI-compatible endpoint and the web page, on the live actors."""

from __future__ import annotations

from typing import Annotated

import typer

from k3ray.cli.supernode_args import home_from_environment, read_cluster, read_spec


def serve(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of a SupernodeSpec")] = None,
    preset: Annotated[str | None, typer.Option(help="model preset, e.g. k3-nano")] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="HTTP port (default: the spec's, 8000)")
    ] = None,
    cluster: Annotated[str | None, typer.Option(help="YAML of the local Ray node")] = None,
) -> None:
    """Deploy the endpoint; brings the supernode up first when it is not."""
    from k3ray.actors.supernode import connect, ensure_up, is_up
    from k3ray.serve.app import deploy

    home, local = home_from_environment(), read_cluster(cluster)
    if config is None and preset is None and not overrides:
        if is_up(home):
            supernode = connect(home)  # whatever is up, by its own spec
        else:
            supernode = ensure_up(read_spec(None, [], None), home, local, say=typer.echo)
    else:
        spec = read_spec(config, overrides or [], preset)
        supernode = ensure_up(spec, home, local, say=typer.echo)
    url = deploy(supernode, port=port)
    typer.echo(f"serving at {url}/v1 (page: {url}/ui, health: {url}/health)")
