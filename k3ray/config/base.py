"""The strict base of every configuration object: frozen, no unknown keys, no NaN, no coercion."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Frozen pydantic model that refuses unknown keys and silent type coercion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
