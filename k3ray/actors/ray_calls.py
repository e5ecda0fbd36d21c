"""Calls of actor methods with a deadline and typed errors: the one place that reads Ray's errors.

A dead actor is `PeerLostError`, silence is `DeadlineError`, what the method raised comes through as
itself. `call` blocks; `call_async` does not.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from k3ray.clock import Deadline
from k3ray.errors import K3RayError, PeerLostError, SupernodeError


def call(actor: Any, method: str, *args: Any, peer: str, limit_s: float) -> Any:
    """`actor.method(*args)`, waiting at most `limit_s` for its answer.

    Raises:
        DeadlineError: no answer within `limit_s`.
        PeerLostError: the actor is dead or cannot be reached.
        K3RayError: what the method raised.
    """
    deadline = Deadline.after(limit_s, operation=method, peer=peer)
    try:
        return ray.get(getattr(actor, method).remote(*args), timeout=limit_s)
    except GetTimeoutError as error:
        raise deadline.error() from error
    except RayError as error:
        raise typed_error(error, peer=peer, method=method) from error


async def call_async(actor: Any, method: str, *args: Any, peer: str, limit_s: float) -> Any:
    """`call` without blocking the event loop.

    The call is made in an empty context: Ray would take it for a child of the HTTP request that
    happens to run, and cancel it with that, though others may be attached to the same work.
    """
    deadline = Deadline.after(limit_s, operation=method, peer=peer)
    try:
        async with asyncio.timeout(limit_s):
            return await Context().run(lambda: getattr(actor, method).remote(*args))
    except TimeoutError as error:
        raise deadline.error() from error
    except RayError as error:
        raise typed_error(error, peer=peer, method=method) from error


def typed_error(error: RayError, *, peer: str, method: str) -> K3RayError:
    """What Ray's error means: see the module."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, K3RayError):
        return cause
    if isinstance(error, RayActorError) and getattr(error, "actor_init_failed", False):
        said = str(error).strip().splitlines()
        return SupernodeError(
            f"{peer} could not begin: {said[-1] if said else type(error).__name__}",
            remedy="mend what it says and try again", peer=peer,
        )  # fmt: skip
    if isinstance(error, RayActorError):
        return PeerLostError(
            f"{peer} died or cannot be reached during {method}",
            remedy="it is replaced; see `k3ray status`", peer=peer, operation=method,
        )  # fmt: skip
    inner = cause if isinstance(error, RayTaskError) and cause is not None else error
    return SupernodeError(
        f"{method} failed at {peer}: {type(inner).__name__}: {inner}",
        remedy="this is a bug; the actor's log has the traceback", peer=peer,
    )  # fmt: skip
