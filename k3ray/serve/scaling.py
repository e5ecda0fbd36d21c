"""`POST /scale_elastic_ep` and `/is_scaling_elastic_ep`: other engines' doors to the size.

With vLLM's key (`new_data_parallel_size`) the answer comes when the change is complete, with
SGLang's (`new_ep_size`) at once; both mean the number of expert groups. Requests are served on
meanwhile, and a change that fails leaves the old size.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from k3ray.clock import Deadline
from k3ray.errors import (
    BadRequestError,
    ConfigError,
    PlacementError,
    PlanError,
    ScaleFailedError,
)
from k3ray.serve.router import StackRouter
from k3ray.text.strict_json import bad_field, parse_json_object, shown

WAITING_KEY = "new_data_parallel_size"
AT_ONCE_KEY = "new_ep_size"
_WAIT_KEY = "drain_timeout"
_DEFAULT_WAIT_S = 120.0
_MAX_WAIT_S = 3600.0
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCall:
    """What a client asks for.

    Args:
        key: The key that it used.
        groups: Expert groups from now on.
        wait_s: How long to wait for the change; None: not at all.
    """

    key: str
    groups: int
    wait_s: float | None


def parse_scale(body: bytes) -> ScaleCall:
    """Read a body.

    Raises:
        BadRequestError: names the field.
    """
    fields = parse_json_object(body)
    unknown = sorted(fields.keys() - {WAITING_KEY, AT_ONCE_KEY, _WAIT_KEY})
    if unknown:
        raise bad_field(unknown[0], f"unknown; known: {WAITING_KEY}, {AT_ONCE_KEY}, {_WAIT_KEY}")
    given = [key for key in (WAITING_KEY, AT_ONCE_KEY) if key in fields]
    if len(given) != 1:
        raise bad_field(WAITING_KEY, f"send it or {AT_ONCE_KEY}, one of them")
    key, groups = given[0], fields[given[0]]
    if not isinstance(groups, int) or isinstance(groups, bool) or groups < 1:
        raise bad_field(key, f"must be a whole number from 1, not {shown(groups)}")
    wait_s = fields.get(_WAIT_KEY, _DEFAULT_WAIT_S)
    if (
        not isinstance(wait_s, int | float)
        or isinstance(wait_s, bool)
        or not 0 < wait_s <= _MAX_WAIT_S
    ):
        raise bad_field(
            _WAIT_KEY, f"must be seconds, above 0 and up to {_MAX_WAIT_S:g}, not {shown(wait_s)}"
        )
    return ScaleCall(key=key, groups=groups, wait_s=wait_s if key == WAITING_KEY else None)


async def scale(router: StackRouter, call: ScaleCall) -> dict[str, Any]:
    """Have the size changed; the answer's body.

    Raises:
        BadRequestError: the cluster or the model cannot have that many groups.
        ScalingError: another change is under way.
        ScaleFailedError: the change was taken back; says why.
        BadRequestError: with status 408, not complete in time (it goes on).
    """
    try:
        await router.scale(groups=call.groups)
    except (ConfigError, PlacementError, PlanError) as error:
        raise BadRequestError(
            f"{call.key}: {error.message}", remedy=error.remedy, param=call.key, code=error.code
        ) from error
    if call.wait_s is None:
        return {"success": True, "message": f"Scaling to {call.groups} expert groups"}
    deadline = Deadline.after(call.wait_s, operation="scale", peer="controller")
    while (scaling := (await router.status())["scaling"])["under_way"]:
        if deadline.passed():
            raise BadRequestError(
                f"not complete after {call.wait_s:g} s; it goes on",
                remedy="ask /is_scaling_elastic_ep how far it is",
                param=_WAIT_KEY, code="scale_timeout", status=408,
            )  # fmt: skip
        await asyncio.sleep(_LOOK_EVERY_S)
    if scaling["failure"]:
        raise ScaleFailedError(
            f"scaling to {call.groups} expert groups failed: {scaling['failure']}",
            remedy="it serves with the old size; see `k3ray status`",
        )
    return {"message": f"Scaled to {scaling['groups']} expert groups", "groups": scaling["groups"]}


async def progress(router: StackRouter) -> dict[str, Any]:
    """How far a change is."""
    scaling = (await router.status())["scaling"]
    return {
        "is_scaling_elastic_ep": scaling["under_way"],
        "ep_size": scaling["groups"],
        "target_ep_size": scaling["target"]["groups"] if scaling["under_way"] else None,
        "last_error": scaling["failure"] or None,
    }
