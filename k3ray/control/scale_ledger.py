"""`ScaleLedger`: the wanted size and the live layouts of the experts, kept in the journal.

A change is written before anything follows from it. Its layout counts from the plan that switches
to it; a controller that takes over before that takes the groups' part back, and goes on with the
stacks'. Taking a change back is a change, too.
"""

from __future__ import annotations

from dataclasses import replace

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.ledger import Ledger
from k3ray.control.records import Scaled, Size
from k3ray.control.view import LayoutView, ScaleView, group_ids, stack_ids
from k3ray.errors import ScalingError
from k3ray.ids import Role
from k3ray.placement.layout import Layout, MovePlan, moves_between, rescale


class ScaleLedger:
    """See the module.

    Args:
        spec: As the supernode was brought up.
        first: The layout that it was brought up with.
        ledger: The journal.
        now_s: Monotonic seconds; a change taken over counts from here.
    """

    def __init__(self, spec: SupernodeSpec, first: Layout, ledger: Ledger, *, now_s: float) -> None:
        self._ledger = ledger
        self._since_s = now_s
        self.layout = ledger.state.layout or first
        self.next_layout: Layout | None = None
        self.old_layout: Layout | None = None
        self.layout_since_s = now_s
        scaled = ledger.state.scaled
        size = Size(groups=len(self.layout.groups), stacks=spec.stacks)
        if scaled is not None:
            size = replace(size, stacks=scaled.size.stacks)
            if size != scaled.size:
                reason = "its controller ended before the new layout was ready"
                ledger.write(replace(scaled, size=size, layout=None, failure=reason))
        self.spec = of_size(spec, size)

    @property
    def last(self) -> Scaled | None:
        """The last change, complete or not."""
        return self._ledger.state.scaled

    def view(self) -> ScaleView | None:
        """The change that is under way."""
        scaled = self.last
        if scaled is None or scaled.ended:
            return None
        return ScaleView(previous=scaled.previous, target=scaled.size, since_s=self._since_s)

    def live_layouts(self) -> dict[int, Layout]:
        """Layouts whose shares are kept, by number."""
        layouts = (self.old_layout, self.layout, self.next_layout)
        return {layout.number: layout for layout in layouts if layout is not None}

    def _known_stacks(self) -> tuple[str, ...]:
        """Stacks of the spec, and during a change those it takes away."""
        scale = self.view()
        most = max(self.spec.stacks, scale.previous.stacks if scale else 0)
        return stack_ids(self.spec.model_copy(update={"stacks": most}))

    def wanted_actors(self) -> dict[str, Role]:
        """Groups of the live layouts, stacks of the spec and those that a change takes away."""
        layouts = self.live_layouts().values()
        groups = (group for layout in layouts for group in layout.groups)
        return {
            **dict.fromkeys(groups, Role.EXPERT_GROUP),
            **dict.fromkeys(self._known_stacks(), Role.ATTENTION_STACK),
        }

    def begin(self, size: Size, reason: str, now_s: float) -> MovePlan | None:
        """Want another size from here on; what has to be loaded for it if the groups change.

        Raises:
            ScalingError: another change is under way.
            PlanError: no layout has so many groups.
            JournalError: the disk failed; nothing changed.
        """
        scale = self.view()
        if scale is not None:
            raise ScalingError(
                f"the size is being changed from {scale.previous} to {scale.target}",
                remedy="wait until that is complete (k3ray status)",
            )
        groups = group_ids(size.groups)
        layout = None
        if groups != self.layout.groups:
            layout = replace(
                rescale(self.layout, groups, self.spec.replication),
                number=self._ledger.state.last_layout + 1,
            )
        self._want(Scaled(size=size, previous=self._size(), layout=layout, reason=reason), now_s)
        return moves_between(self.layout, layout) if layout else None

    def switched(self, number: int, now_s: float) -> None:
        """A plan of that layout was recorded."""
        if self.next_layout is not None and self.next_layout.number == number:
            self.old_layout, self.layout, self.next_layout = self.layout, self.next_layout, None
            self.layout_since_s = now_s
            self.spec = of_size(self.spec, self._size())

    def retire(self, number: int) -> None:
        """The layout before the current one is used no more."""
        if self.old_layout is not None and self.old_layout.number == number:
            self.old_layout = None

    def end(self, reason: str) -> None:
        """The change is complete."""
        scaled = self.last
        if scaled is not None and not scaled.ended:
            self._ledger.write(replace(scaled, ended=True, reason=reason))

    def roll_back(self, reason: str, now_s: float) -> None:
        """Want the size before the change again, but for groups that have switched already."""
        scale = self.view()
        if scale is not None:
            size = replace(self._size(), stacks=scale.previous.stacks)
            record = Scaled(size=size, previous=scale.target, reason="taken back", failure=reason)
            self._want(record, now_s)

    def _size(self) -> Size:
        """Groups that serve, stacks that are wanted."""
        return Size(groups=len(self.layout.groups), stacks=self.spec.stacks)

    def _want(self, record: Scaled, now_s: float) -> None:
        self._ledger.write(record)
        self.next_layout = record.layout
        # The spec has the groups that serve: it follows when the plan switches.
        self.spec = of_size(self.spec, replace(self._size(), stacks=record.size.stacks))
        self._since_s = now_s


def layout_view(layout: Layout) -> LayoutView:
    """A layout as `decide` sees it."""
    return LayoutView(number=layout.number, groups=layout.groups, holder_sets=layout.holder_sets())


def of_size(spec: SupernodeSpec, size: Size) -> SupernodeSpec:
    """The spec with another size; a partition that was given is of the old one."""
    changed = spec.model_copy(update={"stacks": size.stacks, "groups": size.groups})
    return changed if size.groups == spec.groups else changed.model_copy(update={"partition": None})
