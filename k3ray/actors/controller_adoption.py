"""Taking over the actors of an earlier controller: they serve on, nothing is started anew.

A life is adopted when the journal says that it was ready, its process lives, and it answers what it
holds; from that answer on it refuses the earlier controller. Everybody else is fenced and replaced.
"""

from __future__ import annotations

import asyncio
import logging

from k3ray.actors.controller_cluster import ActorCluster, is_alive, is_stopped, own_node
from k3ray.clock import monotonic
from k3ray.control.supervisor import Supervisor
from k3ray.errors import K3RayError
from k3ray.ids import Incarnation

_log = logging.getLogger(__name__)


async def adopt_all(
    supervisor: Supervisor, cluster: ActorCluster, *, limit_s: float
) -> list[Incarnation]:
    """Adopt whom it is possible to adopt, each within `limit_s`; returns them."""
    lives = supervisor.adoptable()
    done = await asyncio.gather(*(_adopt(supervisor, cluster, life, limit_s) for life in lives))
    adopted = [life for life, yes in zip(lives, done, strict=True) if yes]
    supervisor.take_over_plan()
    if lives:
        _log.info("event=actors.adopted %s of %s", len(adopted), len(lives))
    return adopted


async def _adopt(
    supervisor: Supervisor, cluster: ActorCluster, life: Incarnation, limit_s: float
) -> bool:
    facts = supervisor.process_of(life.actor)
    if facts is None:
        return False
    if facts.node == own_node() and (not is_alive(facts) or is_stopped(facts)):
        return False
    try:
        holding = await cluster.ask_held(life, limit_s=limit_s)
    except K3RayError as error:
        _log.warning("event=actor.not_adopted incarnation=%s error=%s", life, error)
        return False
    supervisor.adopt(life, holding, monotonic())
    return True
