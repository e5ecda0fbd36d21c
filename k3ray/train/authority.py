"""`LineAuthority`: who decides that a step, a checkpoint or a version exists: the controller.

The trainer asks, the authority journals. Implementations: the controller over Ray (`jobs`), and
in memory for tests. Every method that names the line's lease raises `LeaseLostError` once it is
over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from k3ray.weights.manifest import Meta, ShardInfo
from k3ray.weights.store import StagedEntry

Json = str | int | float | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The commit record of one step: commit, data ledger and recovery point in one.

    Args:
        line, step, attempt: The attempt that commits.
        plan: Placement plan of the attempt.
        cursor_start, cursor_stop: Global positions of the samples read.
        sample_digest: Digest of which sequences they are.
        num_tokens: Tokens with loss.
        loss: Mean loss in nats; None when it was not finite.
        grad_norm: Global gradient norm before clipping; None when it was not finite.
        lr: Learning rate.
        skipped: The gradients were not finite: parameters stay, the step counts.
        num_updates: Optimizer updates up to and with this step.
        holder_digests: Digest of the staged update by holder.
    """

    line: str
    step: int
    attempt: int
    plan: int
    cursor_start: int
    cursor_stop: int
    sample_digest: str
    num_tokens: int
    loss: float | None
    grad_norm: float | None
    lr: float
    skipped: bool
    num_updates: int
    holder_digests: Mapping[str, str]

    def to_body(self) -> dict[str, Json | dict[str, str]]:
        """JSON-able form for the journal."""
        return {**asdict(self), "holder_digests": dict(self.holder_digests)}


class LineAuthority(Protocol):
    """See the module docstring; bound to one line and one lease."""

    def begin_attempt(self, step: int) -> int:
        """Open the next attempt at `step`; attempts grow over the whole life of the line."""
        ...

    def commit_step(self, record: StepRecord) -> None:
        """Journal the step; after this returns the step has happened.

        Raises:
            StepAbortedError: another attempt is open, or a holder died since it acknowledged.
        """
        ...

    def begin_checkpoint(self, step: int) -> StagedEntry:
        """Where the shards of a checkpoint are to be written."""
        ...

    def commit_checkpoint(
        self, staged: StagedEntry, shards: Sequence[ShardInfo], meta: Meta
    ) -> str:
        """Make the checkpoint exist; returns its entry's name."""
        ...

    def begin_publish(self, step: int) -> StagedEntry:
        """Where the shards of a new version are to be written.

        Raises:
            CapacityError: all live versions are pinned; try again later.
        """
        ...

    def commit_publish(self, staged: StagedEntry, shards: Sequence[ShardInfo], meta: Meta) -> str:
        """Make the version exist and live; returns its text.

        Raises:
            StaleVersionError: a holder did not take it in time; the old version serves on.
        """
        ...

    def report(self, metrics: Mapping[str, Json]) -> None:
        """Tell the state of the training; best effort."""
        ...
