"""Arguments that the supernode commands share: the spec, the home, the local cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.config.load import load_config
from k3ray.config.supernode import SupernodeSpec


def home_from_environment() -> Home:
    """The home that `K3RAY_HOME` names, else `~/.k3ray`."""
    return Home.from_env(os.environ)


def read_spec(config: str | None, overrides: Sequence[str], preset: str | None) -> SupernodeSpec:
    """The spec of a YAML file (or the defaults) with `key=value` overrides.

    Raises:
        ConfigError: all violations at once.
    """
    chosen = [] if preset is None else [f"preset={preset}"]
    return load_config(SupernodeSpec, config, [*chosen, *overrides])


def read_cluster(path: str | None) -> LocalClusterConfig:
    """The local cluster's config: `path`, else cluster/local.yaml beside the package, else the
    defaults (which are the same)."""
    beside = Path(__file__).parents[2] / "cluster" / "local.yaml"
    chosen = path or (str(beside) if beside.is_file() else None)
    return load_config(LocalClusterConfig, chosen)
