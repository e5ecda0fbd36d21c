"""`ClientRegistry`: processes that are not restarted by the controller but are known to it.

Ingress replicas and train workers register, get a term, and send heartbeats. One that is dead (its
pid is gone) or silent for too long disappears; a lower term than the latest is refused. Times are
monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from k3ray.actors.controller_cluster import (
    is_alive,
    is_stopped,
    kill_process,
    own_node,
    process_started,
)
from k3ray.control.ledger import Ledger
from k3ray.control.records import ActorLost, ActorReady, TermGranted
from k3ray.control.supervisor import ProcessFacts
from k3ray.errors import FencedError, SupernodeError
from k3ray.ids import Incarnation, Role, refuse_lower_term

MAX_CLIENTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientFacts:
    """One registered life."""

    incarnation: Incarnation
    role: Role
    process: ProcessFacts
    seen_s: float


class ClientRegistry:
    """See the module.

    Args:
        silence_s: How long a client may go without a heartbeat.
        stopped_s: How long an ingress may be stopped (SIGSTOP).
    """

    def __init__(self, ledger: Ledger, *, silence_s: float, stopped_s: float) -> None:
        self._ledger = ledger
        self._silence_s = silence_s
        self._stopped_s = stopped_s
        self._clients: dict[str, ClientFacts] = {}
        self._stopped_since: dict[Incarnation, float] = {}

    def register(
        self, role: Role, actor: str, process: tuple[int, str, str], *, now_s: float
    ) -> Incarnation:
        """Grant a term to a new life; `process` is (pid, node, endpoint).

        Raises:
            SupernodeError: too many clients.
        """
        if actor not in self._clients and len(self._clients) >= MAX_CLIENTS:
            raise SupernodeError(
                f"{MAX_CLIENTS} clients are registered", remedy="end some jobs or replicas"
            )
        pid, node, endpoint = process
        term = self._ledger.state.term_of(actor) + 1
        incarnation = Incarnation(actor=actor, term=term)
        facts = ProcessFacts(
            node=node, pid=pid, endpoint=endpoint,
            process_started_unix_s=process_started(pid) if node == own_node() else 0.0,
        )  # fmt: skip
        self._ledger.write(TermGranted(incarnation=incarnation, role=role))
        ready = ActorReady(
            incarnation=incarnation,
            role=role,
            node=node,
            pid=pid,
            endpoint=endpoint,
            process_started_unix_s=facts.process_started_unix_s,
        )
        self._ledger.write(ready)
        self._clients[actor] = ClientFacts(
            incarnation=incarnation, role=role, process=facts, seen_s=now_s
        )
        return incarnation

    def heartbeat(self, incarnation: Incarnation, *, now_s: float) -> None:
        """A sign of life.

        Raises:
            FencedError: that life was replaced, or dropped for its silence; register anew.
        """
        refuse_lower_term(
            seen=self._ledger.state.term_of(incarnation.actor),
            offered=incarnation.term,
            who=incarnation.actor,
        )
        facts = self._clients.get(incarnation.actor)
        if facts is None:
            raise FencedError(
                f"{incarnation} is not registered (any more)",
                remedy="register again",
                who=incarnation.actor,
                offered=incarnation.term,
                seen=self._ledger.state.term_of(incarnation.actor),
            )
        self._clients[incarnation.actor] = replace(facts, seen_s=now_s)

    def drop_dead(self, *, now_s: float) -> tuple[ClientFacts, ...]:
        """Forget the dead and the silent; returns them. A stopped ingress is ended: Serve replaces
        it at once then, and its clients go on there."""
        gone = []
        for actor, facts in list(self._clients.items()):
            here = facts.process.node == own_node()
            if here and not is_alive(facts.process):
                reason = "its process is gone"
            elif here and facts.role is Role.INGRESS and self._stopped_too_long(facts, now_s):
                kill_process(facts.process)
                reason = "its process is stopped"
            elif now_s - facts.seen_s > self._silence_s:
                reason = f"no heartbeat for {self._silence_s:g} s"
            else:
                continue
            del self._clients[actor]
            self._stopped_since.pop(facts.incarnation, None)
            self._ledger.write(ActorLost(incarnation=facts.incarnation, reason=reason))
            gone.append(facts)
        return tuple(gone)

    def _stopped_too_long(self, facts: ClientFacts, now_s: float) -> bool:
        if not is_stopped(facts.process):
            self._stopped_since.pop(facts.incarnation, None)
            return False
        return now_s - self._stopped_since.setdefault(facts.incarnation, now_s) >= self._stopped_s

    def find(self, actor: str) -> Incarnation | None:
        """The registered life of an actor."""
        facts = self._clients.get(actor)
        return None if facts is None else facts.incarnation

    def all(self) -> tuple[ClientFacts, ...]:
        """Everybody registered now."""
        return tuple(self._clients.values())
