"""`LocalClusterConfig`: what the local Ray node offers; `cluster/local.yaml` is one of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from k3ray.config.base import Strict


class LocalClusterConfig(Strict):
    """A single-node Ray cluster on this machine.

    `num_cpus` is logical: our actors take none, and Ray's own pools need room whatever the
    machine has. `resources` are whole units, one per expert group and per attention stack.
    """

    num_cpus: int = Field(default=16, ge=1)
    resources: Mapping[str, int] = {"k3_group": 16, "k3_stack": 8}
    object_store_bytes: int = Field(default=512 * 1024 * 1024, ge=80 * 1024 * 1024)
    dashboard: bool = True
    dashboard_port: int = Field(default=8265, ge=1, le=65535)
    auth_mode: Literal["disabled", "token"] = "disabled"
