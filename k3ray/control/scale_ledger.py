"""`ScaleLedger`: how many attention stacks are wanted, kept in the journal.

A change is written before anything follows from it, so a new controller goes on with it. Taking a
change back is a change, too.
"""

from __future__ import annotations

from dataclasses import replace

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.ledger import Ledger
from k3ray.control.records import StacksScaled
from k3ray.control.view import ScaleView, stack_ids
from k3ray.errors import SupernodeError


class ScaleLedger:
    """See the module.

    Args:
        spec: As the supernode was brought up.
        ledger: The journal.
        now_s: Monotonic seconds; a change taken over counts from here.
    """

    def __init__(self, spec: SupernodeSpec, ledger: Ledger, *, now_s: float) -> None:
        self._ledger = ledger
        self._since_s = now_s
        scaled = ledger.state.scaled
        self.spec = spec if scaled is None else _with_stacks(spec, scaled.stacks)

    @property
    def last(self) -> StacksScaled | None:
        """The last change, complete or not."""
        return self._ledger.state.scaled

    def view(self) -> ScaleView | None:
        """The change that is under way."""
        scaled = self.last
        if scaled is None or scaled.ended:
            return None
        return ScaleView(previous=scaled.previous, target=scaled.stacks, since_s=self._since_s)

    def known_stacks(self) -> tuple[str, ...]:
        """Stacks of the spec, and during a change those it takes away."""
        scale = self.view()
        most = max(self.spec.stacks, scale.previous if scale else 0)
        return stack_ids(_with_stacks(self.spec, most))

    def begin(self, stacks: int, reason: str, now_s: float) -> None:
        """Want another number of stacks from here on.

        Raises:
            SupernodeError: another change is under way.
            JournalError: the disk failed; nothing changed.
        """
        scale = self.view()
        if scale is not None:
            raise SupernodeError(
                f"the number of stacks is being changed from {scale.previous} to {scale.target}",
                remedy="wait until that is complete (k3ray status)",
            )
        self._want(stacks, self.spec.stacks, reason, now_s)

    def end(self, reason: str) -> None:
        """The change is complete."""
        scaled = self.last
        if scaled is not None and not scaled.ended:
            self._ledger.write(replace(scaled, ended=True, reason=reason))

    def roll_back(self, reason: str, now_s: float) -> None:
        """Want the number before the change again."""
        scale = self.view()
        if scale is not None:
            self._want(scale.previous, scale.target, reason, now_s)

    def _want(self, stacks: int, previous: int, reason: str, now_s: float) -> None:
        self._ledger.write(
            StacksScaled(stacks=stacks, previous=previous, ended=False, reason=reason)
        )
        self.spec = _with_stacks(self.spec, stacks)
        self._since_s = now_s


def _with_stacks(spec: SupernodeSpec, stacks: int) -> SupernodeSpec:
    return spec.model_copy(update={"stacks": stacks})
