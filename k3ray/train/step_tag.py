"""`StepTag` and `UpdatePlan`: what every training message carries, and what one update is.

A step attempt is (line, step, attempt); a holder that has seen a later attempt refuses earlier
ones, so nothing of an aborted attempt can leak into its successor.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3ray.transport.protocol import Meta


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class StepTag:
    """One attempt of one optimizer step; steps count from 1, and attempts grow over the whole life
    of the line, so a step replayed after a roll-back has a higher attempt than the first time."""

    line: str
    step: int
    attempt: int

    def to_meta(self) -> dict[str, str | int | float | bool | None]:
        """The tag as message metadata."""
        return {"line": self.line, "step": self.step, "attempt": self.attempt}

    @staticmethod
    def from_meta(meta: Meta) -> StepTag:
        """Inverse of `to_meta`."""
        return StepTag(
            line=str(meta["line"]), step=int(meta["step"] or 0), attempt=int(meta["attempt"] or 0)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """One AdamW update, equal for every holder of the step.

    Args:
        lr: Learning rate.
        beta1, beta2, eps, weight_decay: AdamW's; decay is decoupled.
        grad_scale: Factor on every gradient (clipping by the global norm).
        skip: Keep master and moments (the step had NaN or infinity): the step commits as a no-op.
        num_updates: Updates applied so far; the bias correction uses `num_updates + 1`.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float
    skip: bool
    num_updates: int

    def to_meta(self) -> dict[str, str | int | float | bool | None]:
        """The plan as message metadata."""
        return {
            "lr": self.lr, "beta1": self.beta1, "beta2": self.beta2, "eps": self.eps,
            "weight_decay": self.weight_decay, "grad_scale": self.grad_scale,
            "skip": self.skip, "num_updates": self.num_updates,
        }  # fmt: skip

    @staticmethod
    def from_meta(meta: Meta) -> UpdatePlan:
        """Inverse of `to_meta`."""

        def number(key: str) -> float:
            return float(meta[key] or 0.0)

        return UpdatePlan(
            lr=number("lr"), beta1=number("beta1"), beta2=number("beta2"), eps=number("eps"),
            weight_decay=number("weight_decay"), grad_scale=number("grad_scale"),
            skip=bool(meta["skip"]), num_updates=int(meta["num_updates"] or 0),
        )  # fmt: skip
