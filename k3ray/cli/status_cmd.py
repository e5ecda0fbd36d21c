"""`k3ray status`: every actor, plan and weight version, leases and the last decisions."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from k3ray.cli.supernode_args import home_from_environment


def status(
    as_json: Annotated[bool, typer.Option("--json", help="the whole status as JSON")] = False,
) -> None:
    """Show the running supernode."""
    from k3ray.actors.supernode import connect

    document = connect(home_from_environment()).call("status")
    if as_json:
        typer.echo(json.dumps(document, indent=2))
        return
    for line in render(document):
        typer.echo(line)


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
        lines.append(f"decided: {decision['command']} because {decision['reason']}")
    return lines
