"""What a chaos campaign does to a supernode, and when: a pure function of a seed.

Time is logical: a fault strikes once the clients have received so many tokens in all. The same seed
gives the same faults at the same points, whatever the machine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from k3ray.errors import ConfigError
from k3ray.ids import Role

ROLES = (Role.EXPERT_GROUP, Role.ATTENTION_STACK, Role.CONTROLLER, Role.INGRESS)


class FaultKind(StrEnum):
    """SIGKILL; SIGSTOP until the supernode is whole again; SIGSTOP for a moment (a slow peer)."""

    KILL = "kill"
    STOP = "stop"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Args:
        number: From 1.
        at_token: Tokens received by all clients together when it strikes.
        choice: In [0, 1): which of the actors of that role.
    """

    number: int
    at_token: int
    role: Role
    kind: FaultKind
    choice: float

    def victim(self, actors: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """The actor (an entry of the status document) that it hits; None if none has a process."""
        there = [a for a in actors if a["role"] == str(self.role) and a["pid"]]
        there.sort(key=lambda actor: str(actor["id"]))
        return there[int(self.choice * len(there))] if there else None


def schedule(
    seed: int,
    num_faults: int,
    *,
    roles: Sequence[Role] = ROLES,
    kinds: Sequence[FaultKind] = tuple(FaultKind),
    tokens_between: int = 100,
) -> tuple[Fault, ...]:
    """The faults of a campaign, in order.

    Args:
        tokens_between: Mean distance of two faults.

    Raises:
        ConfigError: nothing to choose from, or a number below 1.
    """
    if not roles or not kinds or num_faults < 1 or tokens_between < 1:
        raise ConfigError(
            "a campaign needs roles, kinds, a fault and a token between two of them at least",
            remedy="see `k3ray chaos run --help`", violations=("campaign",),
        )  # fmt: skip
    chance = random.Random(seed)
    faults, at_token = [], 0
    for number in range(1, num_faults + 1):
        at_token += 1 + int(chance.random() * 2 * tokens_between)
        faults.append(
            Fault(
                number=number, at_token=at_token, role=roles[int(chance.random() * len(roles))],
                kind=kinds[int(chance.random() * len(kinds))], choice=chance.random(),
            )
        )  # fmt: skip
    return tuple(faults)
