"""`PlanHolder`: the newest placement plan of a process, set by one thread, awaited by others."""

from __future__ import annotations

import threading

from k3ray.clock import Deadline
from k3ray.errors import PlanError
from k3ray.placement.plan import PlacementPlan


class PlanHolder:
    """Thread-safe; only ever goes to a higher version. A `PlanSource` for executors."""

    def __init__(self, plan: PlacementPlan | None = None) -> None:
        self._plan = plan
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """Version of the current plan; 0 before the first."""
        plan = self._plan
        return plan.version if plan is not None else 0

    def set(self, plan: PlacementPlan) -> int:
        """Take a plan unless a newer one is held; returns the version now held."""
        with self._changed:
            if self._plan is None or plan.version > self._plan.version:
                self._plan = plan
                self._changed.notify_all()
            return self._plan.version

    def current(self) -> PlacementPlan:
        """The current plan.

        Raises:
            PlanError: none has been set yet.
        """
        plan = self._plan
        if plan is None:
            raise PlanError("no placement plan yet", remedy="wait until the supernode is up")
        return plan

    def wait_newer(self, than_version: int, deadline: Deadline) -> PlacementPlan:
        """The first plan seen with a version above `than_version`.

        Raises:
            DeadlineError: none came in time.
        """
        with self._changed:
            while self.version <= than_version:
                left_s = deadline.left_s()
                if left_s <= 0:
                    raise deadline.error(
                        f"no plan above version {than_version} came: see k3ray status"
                    )
                self._changed.wait(left_s)
            return self.current()
