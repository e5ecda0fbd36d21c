"""`k3ray status`: every actor, plan and weight version, leases and the last decisions."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from k3ray.cli.supernode_args import home_from_environment

if TYPE_CHECKING:
    from k3ray.actors.supernode import Supernode

MAX_VALUE_CHARS = 60


def status(
    as_json: Annotated[bool, typer.Option("--json", help="the whole status as JSON")] = False,
) -> None:
    """Show the running supernode."""
    from k3ray.actors.supernode import connect

    supernode = connect(home_from_environment())
    document = supernode.call("status")
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for line in (*places(supernode, document), *render(document)):
        typer.echo(line)


def places(supernode: Supernode, document: dict[str, Any]) -> list[str]:
    """Where things are: home, Ray's dashboard (jobs go there too), endpoint."""
    urls = [str(a["endpoint"]) for a in document["actors"] if "endpoint" in a]
    endpoint = f"{urls[-1]}/v1 (page {urls[-1]}/ui)" if urls else "none yet: `k3ray serve`"
    return [
        f"home       {supernode.home.root}",
        f"dashboard  {supernode.info.dashboard_url} (`ray job submit --address` takes it too)",
        f"endpoint   {endpoint}",
    ]


def render(document: dict[str, Any]) -> list[str]:
    """The status as lines of text."""
    versions = ", ".join(
        f"{v['version']}{' (latest)' if v.get('latest') else ''}" for v in document["versions"]
    )
    lines = [
        f"supernode {document['name']} ({document['model']}): {document['state']}, "
        f"plan {document['plan_version']}, versions {versions or 'none'}",
        f"{'role':16} {'id':24} {'term':>4} {'pid':>8} {'state':9} {'node':16} holds",
    ]
    for actor in document["actors"]:
        held = sum(len(experts) for experts in (actor.get("experts") or {}).values())
        lines.append(
            f"{actor['role']:16} {actor['id']:24} {actor['term']:>4} {actor['pid'] or '-':>8} "
            f"{actor['state']:9} {actor['node'] or '-':16} {f'{held} experts' if held else ''}"
        )
    for decision in document.get("decisions", [])[-5:]:
        lines.append(_decision(decision))
    return lines


def _decision(decision: dict[str, Any]) -> str:
    """When, what, about what, why; long values (a whole plan) are left to `--json`."""
    at = time.strftime("%H:%M:%S", time.localtime(decision["time"]))
    about = " ".join(
        f"{key}={value}"
        for key, value in decision.items()
        if key not in ("time", "command", "reason") and len(value) <= MAX_VALUE_CHARS
    )
    return f"decided {at}: {decision['command']} {about} because {decision['reason']}"
