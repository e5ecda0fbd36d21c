"""Ray names of actors. A new life has a new name, so it never collides with a dying one."""

from __future__ import annotations

from k3ray.ids import Incarnation


def actor_name(incarnation: Incarnation) -> str:
    """Name in namespace `NAMESPACE`: "group-0.t3" for the third life of group-0."""
    return f"{incarnation.actor}.t{incarnation.term}"
