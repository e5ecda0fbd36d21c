"""`k3ray config`: a resolved config as YAML with its digest; the JSON Schema of every config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.count import count_parameters
from k3ray.config.jobs import CurateConfig, PretrainConfig
from k3ray.config.load import config_digest, load_config, to_yaml
from k3ray.config.model import ModelConfig
from k3ray.config.resolve import named_model, resolve_model
from k3ray.config.supernode import SupernodeSpec
from k3ray.errors import ConfigError

app = typer.Typer(no_args_is_help=True)


class Kind(StrEnum):
    """Which config is shown."""

    SUPERNODE = "supernode"
    MODEL = "model"
    CLUSTER = "cluster"
    CURATE = "curate"
    PRETRAIN = "pretrain"


_CLASSES: Mapping[Kind, type[BaseModel]] = {
    Kind.SUPERNODE: SupernodeSpec,
    Kind.MODEL: ModelConfig,
    Kind.CLUSTER: LocalClusterConfig,
    Kind.CURATE: CurateConfig,
    Kind.PRETRAIN: PretrainConfig,
}
_PRESET_KEY: Mapping[Kind, str] = {
    Kind.SUPERNODE: "preset",
    Kind.PRETRAIN: "supernode.preset",
}


@app.callback()
def _config() -> None:
    """Show resolved configs and their schemas."""


@app.command()
def show(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value overrides")] = None,
    config: Annotated[
        str | None, typer.Option(help="YAML file, or a release's config.json")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="model preset, e.g. k3-nano")] = None,
    kind: Annotated[Kind, typer.Option("--schema-class", help="which config")] = Kind.SUPERNODE,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of YAML")] = False,
) -> None:
    """Print the resolved config (defaults < file < overrides) and its digest."""
    resolved = resolve(kind, config=config, preset=preset, overrides=overrides or [])
    if as_json:
        typer.echo(json.dumps(resolved.model_dump(mode="json"), indent=2))
        return
    model = _model_of(resolved)  # an unknown preset is said before anything is printed
    typer.echo(to_yaml(resolved), nl=False)
    typer.echo(f"# digest: {config_digest(resolved)}")
    if model is not None:
        count = count_parameters(model.text_config)
        typer.echo(f"# model: {count.total:,} text parameters, {count.active:,} active per token")


@app.command()
def schema(
    kind: Annotated[Kind, typer.Option("--schema-class", help="which config")] = Kind.SUPERNODE,
) -> None:
    """Print the JSON Schema of a config, for editors and other programs."""
    typer.echo(json.dumps(json_schema(kind), indent=2))


def json_schema(kind: Kind) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of what `--schema-class kind` takes; unknown keys are refused.

    What involves several keys (a partition must match `groups`) only loading itself can check.
    """
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {**dialect, **_CLASSES[kind].model_json_schema()}


def resolve(
    kind: Kind, *, config: str | None, preset: str | None, overrides: Sequence[str]
) -> BaseModel:
    """The config that `show` prints.

    Raises:
        ConfigError: all violations at once; or `preset` given where it means nothing.
    """
    if kind is Kind.MODEL:
        base = named_model(preset, config, default="k3-nano")
        if not overrides:
            return base
        return load_config(ModelConfig, None, overrides, base=base.model_dump(mode="json"))
    if preset is not None and kind not in _PRESET_KEY:
        raise ConfigError(
            f"--preset has no meaning for --schema-class {kind}",
            remedy="drop it",
            violations=(f"{kind} has no preset",),
        )
    chosen = [f"{_PRESET_KEY[kind]}={preset}"] if preset is not None else []
    return load_config(_CLASSES[kind], config, [*chosen, *overrides])


def _model_of(resolved: BaseModel) -> ModelConfig | None:
    if isinstance(resolved, ModelConfig):
        return resolved
    if isinstance(resolved, PretrainConfig):
        return resolve_model(resolved.supernode)
    return resolve_model(resolved) if isinstance(resolved, SupernodeSpec) else None
