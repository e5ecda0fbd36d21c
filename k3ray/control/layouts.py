"""Going from one layout of the experts to the next. Pure.

Prepare: every group of the next layout loads its share of every live version beside what it serves.
Switch: one plan names the new holders (`decide`). Retire: once every stack has that plan, groups
let go of what they no longer hold, and groups that hold nothing end. A layout that does not get as
far as the switch is forgotten (`scale`), and its shares with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3ray.control.commands import LAYOUTS_KEY, Command, HoldLayouts, RetireLayout
from k3ray.control.view import ActorState, ActorView, ClusterView, wanted_groups
from k3ray.ids import Role

SETTLE_S = 1.0
"""What is under way by an old plan or to an old stack has ended so long after it was replaced."""


def layout_commands(view: ClusterView, now_s: float) -> Iterator[Command]:
    """What brings groups to the shares of the live layouts."""
    live = view.live_layouts
    for name in wanted_groups(view):
        actor = view.actors.get(name)
        if (
            actor is not None
            and actor.state is ActorState.READY
            and actor.layouts != live
            and LAYOUTS_KEY not in actor.busy
            and now_s >= actor.retry_at_s
        ):
            yield HoldLayouts(
                incarnation=actor.incarnation, layouts=live, reason=_why(view, actor, live)
            )
    old = view.old_layout
    if old is not None and now_s - view.layout_since_s >= SETTLE_S and _all_switched(view):
        yield RetireLayout(
            number=old.number, reason=f"every stack asks by plan {view.plan} or a later one"
        )


def _why(view: ClusterView, actor: ActorView, live: frozenset[int]) -> str:
    coming = view.next_layout
    if coming is not None and coming.number not in actor.layouts:
        return f"layout {coming.number} is being prepared"
    return f"only layout {', '.join(map(str, sorted(live)))} is live"


def _all_switched(view: ClusterView) -> bool:
    """Whether no stack asks by a plan before the current one, and no attempt began under one."""
    stacks = (a for a in view.actors.values() if a.role is Role.ATTENTION_STACK)
    return all(s.plan == view.plan for s in stacks if s.state is ActorState.READY) and all(
        attempt.plan == view.plan for attempt in view.attempts
    )
