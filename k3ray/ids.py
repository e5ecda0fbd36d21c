"""Identities: who an actor is, and in which life.

An `Incarnation` is (actor id, term). The term grows with every life of the same actor id and is
recorded in the controller's journal; everybody refuses lower terms than the highest seen.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from enum import StrEnum

from k3ray.errors import FencedError


class Role(StrEnum):
    """What an actor or process is in the supernode."""

    CONTROLLER = "controller"
    EXPERT_GROUP = "expert_group"
    ATTENTION_STACK = "attention_stack"
    INGRESS = "ingress"
    TRAIN_WORKER = "train_worker"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Incarnation:
    """One life of one actor: `actor` such as "group-0", `term` >= 1."""

    actor: str
    term: int

    def __str__(self) -> str:
        return f"{self.actor}#{self.term}"

    @staticmethod
    def parse(text: str) -> Incarnation:
        """Inverse of `str()`: "group-0#3" -> Incarnation(group-0, 3)."""
        actor, _, term = text.rpartition("#")
        return Incarnation(actor=actor, term=int(term))


def refuse_lower_term(*, seen: int, offered: int, who: str) -> int:
    """Return the higher term, or raise `FencedError` if `offered` is lower than `seen`."""
    if offered < seen:
        raise FencedError(
            f"{who} speaks with term {offered}, term {seen} is current",
            remedy="the caller was replaced; it must exit and reconnect as a new incarnation",
            who=who,
            offered=offered,
            seen=seen,
        )
    return offered


def new_id(prefix: str) -> str:
    """A fresh random id such as "req-9f86d081884c7d65"."""
    return f"{prefix}-{secrets.token_hex(8)}"
