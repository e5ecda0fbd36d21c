"""`GET /weight_info` and `POST /update_weights`: weight versions over HTTP.

The second makes a stored version of the line the latest (a roll-back, or forward again) and answers
when every group and stack has it; open requests keep theirs. A version that cannot be had leaves
the old one.
"""

from __future__ import annotations

from typing import Any

from k3ray.errors import BadRequestError, StoreError
from k3ray.serve.router import StackRouter
from k3ray.text.strict_json import bad_field, parse_json_object, shown

_KEY = "version"


def parse_update(body: bytes) -> str:
    """The version that a client asks for.

    Raises:
        BadRequestError: names the field.
    """
    fields = parse_json_object(body)
    unknown = sorted(fields.keys() - {_KEY})
    if unknown:
        raise bad_field(unknown[0], f"unknown; known: {_KEY}")
    version = fields.get(_KEY)
    if not isinstance(version, str) or not version:
        raise bad_field(_KEY, f"must be a version's text (GET /weight_info), not {shown(version)}")
    return version


async def update(router: StackRouter, version: str) -> dict[str, Any]:
    """Have the version changed; the answer's body.

    Raises:
        BadRequestError: with status 404, no such version is stored whole.
        CapacityError: pinned versions fill the bound.
        StaleVersionError: a holder did not take it; the old version serves on.
    """
    try:
        before = await router.use_version(version)
    except StoreError as error:
        raise BadRequestError(
            f"{_KEY}: {error.message}", remedy="GET /weight_info lists what is stored",
            param=_KEY, code="unknown_version", status=404,
        ) from error  # fmt: skip
    return {
        "success": True,
        "version": version,
        "previous": before,
        "message": "unchanged" if before == version else f"{version} is the latest now",
    }
