"""`k3ray doctor`: is this machine ready for the supernode that is asked for?"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from k3ray.cli.doctor import Level, examine
from k3ray.cli.doctor_facts import gather
from k3ray.cli.supernode_args import home_from_environment, read_cluster, read_spec


def doctor(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file of a SupernodeSpec")] = None,
    preset: Annotated[str | None, typer.Option(help="model preset, e.g. k3-nano")] = None,
    cluster: Annotated[str | None, typer.Option(help="YAML of the local Ray node")] = None,
) -> None:
    """Check Python, packages, ports, disk, memory and leftovers; exit status 1 if one fails."""
    facts = gather(
        read_spec(config, overrides or [], preset),
        read_cluster(cluster),
        home=home_from_environment(),
        env=os.environ,
        constraints_file=Path(__file__).parents[2] / "constraints.txt",
    )
    findings = examine(facts)
    for finding in findings:
        typer.echo(str(finding))
    failed = sum(finding.level is Level.FAIL for finding in findings)
    warned = sum(finding.level is Level.WARN for finding in findings)
    typer.echo(f"{len(findings)} checks, {warned} warnings, {failed} failures")
    if failed:
        raise typer.Exit(1)
