"""`k3ray checkpoint`: make, check and convert checkpoints in the release's layout."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from k3ray.config.numeric import ExpertFormat
from k3ray.config.resolve import preset_config

app = typer.Typer(no_args_is_help=True)

Out = Annotated[Path, typer.Option(help="folder to make")]
Experts = Annotated[ExpertFormat, typer.Option(help="format of the routed experts")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace a folder that is there")]


@app.callback()
def _checkpoint() -> None:
    """Make, check and convert checkpoints in the release's layout."""


@app.command()
def init(
    out: Out,
    preset: Annotated[str, typer.Option(help="model preset, e.g. k3-nano")],
    experts: Experts = ExpertFormat.MXFP4,
    seed: Annotated[int, typer.Option(min=0, help="seed of all tensors")] = 0,
    *,
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint of random tensors, none of them trivial."""
    model = preset_config(preset)
    from k3ray.model.checkpoint_codec import random_source
    from k3ray.weights.checkpoint_writer import write_checkpoint

    write_checkpoint(
        out, model, experts, random_source(model, seed), overwrite=overwrite, progress=_reporter()
    )
    typer.echo(f"wrote {out} ({preset}, experts in {experts}, seed {seed})")


@app.command()
def verify(
    checkpoint: Annotated[Path, typer.Argument(help="folder to check")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON")] = False,
) -> None:
    """Check everything: structure, names, shapes, dtypes, and that every number is finite."""
    from k3ray.model.checkpoint_codec import check_numbers
    from k3ray.weights.checkpoint import Checkpoint

    opened = Checkpoint.open(checkpoint)
    report = _reporter()
    total, size_bytes = len(opened.tensors), 0
    for done, spec in enumerate(check_numbers(opened), start=1):
        size_bytes += spec.size_bytes
        report(done, total)
    if as_json:
        typer.echo(json.dumps({
            "path": str(checkpoint), "experts": str(opened.experts), "tensors": total,
            "bytes": size_bytes, "vision": opened.model.vision_config is not None,
        }))  # fmt: skip
        return
    typer.echo(f"{checkpoint} is whole: {total:,} tensors, {size_bytes:,} bytes, {opened.experts}")


@app.command()
def convert(
    checkpoint: Annotated[Path, typer.Argument(help="folder to read")],
    out: Out,
    experts: Experts,
    *,
    overwrite: Overwrite = False,
) -> None:
    """Copy with the routed experts in another format; tensors and the folder's other files (the
    tokenizer, say) byte for byte, `config.json` with the keys that it had."""
    from k3ray.model.checkpoint_codec import converted, same_bytes
    from k3ray.weights.checkpoint import Checkpoint
    from k3ray.weights.checkpoint_writer import write_checkpoint

    opened = Checkpoint.open(checkpoint)
    source = same_bytes(opened) if experts is opened.experts else converted(opened)
    write_checkpoint(
        out, opened.model, experts, source, overwrite=overwrite, extras=opened.extras(),
        keep=opened.config_document(), progress=_reporter(),
    )  # fmt: skip
    typer.echo(f"wrote {out} (experts {opened.experts} -> {experts})")


@app.command()
def export(
    out: Out,
    version: Annotated[
        str | None, typer.Option(help="weight version (default: the line's latest)")
    ] = None,
    line: Annotated[str, typer.Option(help="line of the version")] = "main",
    preset: Annotated[str, typer.Option(help="preset that it was trained with")] = "k3-nano",
    experts: Experts = ExpertFormat.MXFP4,
    *,
    overwrite: Overwrite = False,
) -> None:
    """Write a published version of this home's weight store; no cluster is needed."""
    from k3ray.cli.supernode_args import home_from_environment
    from k3ray.model.store_export import export_version
    from k3ray.weights.store import WeightStore

    store = WeightStore(home_from_environment().store_dir)
    done = export_version(
        store, out, line=line, version=version, model=preset_config(preset), experts=experts,
        overwrite=overwrite,
    )  # fmt: skip
    typer.echo(f"wrote {out} ({done}, experts in {experts})")


def _reporter() -> Callable[[int, int], None]:
    """Says how far it is, at most every two seconds."""
    said_s = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= 2.0:
            said_s = time.monotonic()
            typer.echo(f"{done} of {total}", err=True)

    return report
