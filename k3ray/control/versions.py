"""How many weight versions may live: the latest, and older ones that open requests pin.

A publish is admitted only if, once it is the latest, the pinned older versions and it stay within
`max_live_versions`. Otherwise it waits, and says for which requests. Pure functions.
"""

from __future__ import annotations

from k3ray.config.supernode import SupernodeSpec
from k3ray.control.commands import WaitForPins
from k3ray.control.view import ClusterView, PinView, VersionView
from k3ray.errors import CapacityError


def pins_of(view: ClusterView, version: str) -> tuple[PinView, ...]:
    """Pins on `version`, oldest first."""
    held = (pin for pin in view.pins if pin.version == version)
    return tuple(sorted(held, key=lambda pin: (pin.since_s, pin.request_id)))


def admit_publish(
    spec: SupernodeSpec, view: ClusterView, line: str, now_s: float
) -> WaitForPins | None:
    """None if another version of `line` may become the latest now, else what to wait for."""
    earlier = [v.version for v in view.versions if v.line == line and not v.active]
    if earlier:
        return WaitForPins(
            line=line, pins=(), reason=f"version {earlier[0]} is still being activated"
        )
    return pins_in_the_way(spec, view, line, now_s)


def pins_in_the_way(
    spec: SupernodeSpec, view: ClusterView, line: str, now_s: float
) -> WaitForPins | None:
    """None if one more version fits beside the pinned ones, else the pins to wait for."""
    pinned = [v for v in view.versions if v.active and pins_of(view, v.version)]
    if len(pinned) + 1 <= spec.max_live_versions:
        return None
    pins = tuple(pin for version in pinned for pin in pins_of(view, version.version))
    if not pins:
        return None
    oldest = max(now_s - pin.since_s for pin in pins)
    facts = ", ".join(f"{v.version} by {len(pins_of(view, v.version))}" for v in pinned)
    return WaitForPins(
        line=line,
        pins=pins,
        reason=(
            f"{len(pinned)} versions are pinned by open requests ({facts}; oldest pin since "
            f"{oldest:.0f} s), max_live_versions is {spec.max_live_versions}"
        ),
    )


def publish_refused(wait: WaitForPins, *, waited_s: float, now_s: float) -> CapacityError:
    """The error of a publish that waited in vain; names the pins and their ages."""
    return CapacityError(
        f"publish to line {wait.line} waited {waited_s:.0f} s: {wait.reason}",
        remedy="retry later, raise max_live_versions or lower max_pin_age_s",
        line=wait.line,
        pins=tuple((p.request_id, p.version, round(now_s - p.since_s, 1)) for p in wait.pins),
        retry_after_s=5.0,
    )


def retirable(view: ClusterView, now_s: float) -> tuple[VersionView, ...]:
    """Active versions that are neither their line's latest nor pinned."""
    if now_s < view.pins_unknown_until_s:
        return ()
    return tuple(
        v for v in view.versions if v.active and not v.latest and not pins_of(view, v.version)
    )
