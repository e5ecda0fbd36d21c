"""`SupernodeSpec`: what `k3ray up` brings up; and the bounds of every queue and wait in it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from k3ray.config.base import Strict
from k3ray.config.numeric import NumericMode


class LaneConfig(Strict):
    """Bounds of one lane at a group: byte credits per client, and its minimum share of time."""

    credit_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    min_share: float = Field(default=0.05, ge=0.0, le=0.5)


class LanesConfig(Strict):
    """Priorities at a group: serve > score > train; `quantum_s` bounds lower-lane work."""

    serve: LaneConfig = LaneConfig(min_share=0.3)
    score: LaneConfig = LaneConfig(min_share=0.05)
    train: LaneConfig = LaneConfig(credit_bytes=256 * 1024 * 1024, min_share=0.1)
    quantum_s: float = Field(default=0.02, gt=0)


class EngineConfig(Strict):
    """Bounds of one attention stack's engine. Pages hold 64 tokens."""

    max_running: int = Field(default=16, gt=0)
    max_waiting: int = Field(default=64, ge=0)
    num_pages: int = Field(default=1024, gt=0)
    prefill_chunk_tokens: int = Field(default=256, gt=0, multiple_of=64)
    step_token_budget: int = Field(default=512, gt=0)
    event_budget: int = Field(default=16384, gt=0)
    orphan_timeout_s: float = Field(default=60.0, gt=0)
    finished_retention_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _budget_leaves_room_for_prefill(self) -> Self:
        if self.step_token_budget < self.max_running + 64:
            raise ValueError(
                f"step_token_budget ({self.step_token_budget}) must be at least max_running "
                f"({self.max_running}) + 64, or full batches never prefill: raise the first"
            )
        return self


class EndpointConfig(Strict):
    """The HTTP ingress."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    replicas: int = Field(default=1, ge=1)
    request_timeout_s: float = Field(default=600.0, gt=0)
    send_stall_timeout_s: float = Field(default=60.0, gt=0)


class DeadlineConfig(Strict):
    """Deadlines in seconds, one table (design, promise 6)."""

    hop_s: float = Field(default=1.0, gt=0)
    prefill_chunk_s: float = Field(default=10.0, gt=0)
    prepare_s: float = Field(default=30.0, gt=0)
    commit_s: float = Field(default=5.0, gt=0)
    start_s: float = Field(default=60.0, gt=0)
    rebuild_s: float = Field(default=120.0, gt=0)
    drain_s: float = Field(default=30.0, gt=0)


class SupernodeSpec(Strict):
    """A supernode: one live model on `groups` expert groups and `stacks` attention stacks.

    `partition`, when given, lists for each group the experts it owns in every MoE layer (uneven
    allowed); otherwise the experts are split evenly and contiguously. With `replication` above 1
    every expert also has read-only copies in other groups, which serve when its home is lost.
    `numeric_mode` is that of serving and training alike. `checkpoint` is a folder in the release's
    layout: it gives the model and the first version of a line that has none; a `tiktoken.model` or
    `tokenizer.json` in it is used unless `tokenizer_file` names another one.
    """

    name: str = Field(default="k3", pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    preset: str = "k3-nano"
    model_config_file: str | None = None
    checkpoint: str | None = None
    tokenizer_file: str | None = None
    line: str = "main"
    numeric_mode: NumericMode = NumericMode.DETERMINISTIC
    seed: int = Field(default=0, ge=0)
    groups: int = Field(default=2, ge=1)
    stacks: int = Field(default=1, ge=1)
    partition: tuple[tuple[int, ...], ...] | None = None
    replication: int = Field(default=1, ge=1)
    max_live_versions: int = Field(default=2, ge=1)
    max_pin_age_s: float = Field(default=3600.0, gt=0)
    lease_ttl_s: float = Field(default=30.0, gt=0)
    store_dir: str | None = None
    journal_file: str | None = None
    engine: EngineConfig = EngineConfig()
    lanes: LanesConfig = LanesConfig()
    endpoint: EndpointConfig = EndpointConfig()
    deadlines: DeadlineConfig = DeadlineConfig()

    @property
    def model_name(self) -> str:
        """What to call the model: the checkpoint or file it comes from, else the preset."""
        return self.checkpoint or self.model_config_file or self.preset

    @model_validator(mode="after")
    def _one_source_of_the_model(self) -> Self:
        if self.checkpoint is not None and self.model_config_file is not None:
            raise ValueError("checkpoint brings its own model: drop model_config_file")
        return self

    @model_validator(mode="after")
    def _partition_matches_groups(self) -> Self:
        if self.partition is not None and len(self.partition) != self.groups:
            raise ValueError(
                f"partition has {len(self.partition)} parts but groups is {self.groups}: "
                "give one part per group or drop partition"
            )
        return self

    @model_validator(mode="after")
    def _every_copy_has_its_group(self) -> Self:
        if self.replication > self.groups:
            raise ValueError(
                f"replication is {self.replication} but groups is {self.groups}: every copy of an "
                "expert needs a group of its own"
            )
        return self
