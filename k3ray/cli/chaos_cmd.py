"""`k3ray chaos run`: hit the supernode of this home on purpose, and see what its clients saw."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer

from k3ray.cli.supernode_args import home_from_environment
from k3ray.client.faults import ROLES, FaultKind, schedule
from k3ray.errors import SupernodeError
from k3ray.ids import Role

app = typer.Typer(no_args_is_help=True)


@app.callback()
def _chaos() -> None:
    """Hit a running supernode on purpose."""


@app.command()
def run(
    seed: Annotated[int, typer.Option(help="of the faults: same seed, same faults")] = 0,
    faults: Annotated[int, typer.Option(min=1, help="how many")] = 20,
    streams: Annotated[int, typer.Option(min=1, max=64, help="streams at once")] = 4,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of a stream")] = 96,
    *,
    tokens_between: Annotated[
        int, typer.Option(min=1, help="mean number of tokens between two faults")
    ] = 200,
    role: Annotated[list[Role] | None, typer.Option(help="only these (repeat)")] = None,
    kind: Annotated[list[FaultKind] | None, typer.Option(help="only these (repeat)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON")] = False,
) -> None:
    """Kill, stop and slow down groups, stacks, the controller and ingresses of this machine while
    seeded streams run, and compare every token and log-probability with an undisturbed run.

    Needs a supernode with an endpoint. Exit status 1 if a client saw anything."""
    if role and not set(role) <= set(ROLES):
        raise typer.BadParameter(f"--role: only {', '.join(ROLES)}")
    planned = schedule(
        seed, faults, roles=role or ROLES, kinds=kind or tuple(FaultKind),
        tokens_between=tokens_between,
    )  # fmt: skip
    from k3ray.actors.supernode import connect
    from k3ray.client.campaign import Campaign, seeded_asks
    from k3ray.client.kimi import AsyncKimiClient
    from k3ray.serve.app import ingress_urls

    supernode = connect(home_from_environment())

    def status() -> dict[str, Any]:
        document: dict[str, Any] = supernode.call("status", limit_s=30.0)
        return document

    urls = ingress_urls(status())
    if not urls:
        raise SupernodeError("it has no endpoint", remedy="run `k3ray serve` first")

    async def campaign() -> tuple[bool, dict[str, Any]]:
        async with AsyncKimiClient(urls[-1], max_breaks=60) as client:
            running = Campaign(
                client=client, status=status, asks=seeded_asks(streams, tokens),
                say=lambda text: typer.echo(text, err=as_json),
            )  # fmt: skip
            return await running.run(planned), running.report()

    unseen, report = asyncio.run(campaign())
    typer.echo(json.dumps({"seed": seed, **report}) if as_json else _text(report))
    if not unseen:
        raise typer.Exit(1)


def _text(report: dict[str, Any]) -> str:
    lines = [f"{name:12} {value}" for name, value in report.items()]
    return "\n".join(lines)
