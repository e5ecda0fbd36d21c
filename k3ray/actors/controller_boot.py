"""Boot of a controller: folders, journal, and the version to begin with.

A fresh line gets its first version from the seed; a line with versions goes on with the latest
that the journal or the store knows. Nothing is taken over that the model config does not fit.
"""

from __future__ import annotations

from pathlib import Path

from k3ray.config.load import config_digest
from k3ray.config.model import TextConfig
from k3ray.config.supernode import SupernodeSpec
from k3ray.control.ledger import Ledger
from k3ray.errors import StoreError
from k3ray.weights.manifest import EntryKind
from k3ray.weights.store import WeightStore
from k3ray.weights.version import WeightVersion

STALE_STAGING_S = 3600.0


def first_version(
    spec: SupernodeSpec, text: TextConfig, store: WeightStore, ledger: Ledger
) -> WeightVersion:
    """The version that a booting supernode serves first; written if the line has none, from the
    spec's checkpoint or fresh by its seed. Slow: run it off the event loop.

    Raises:
        CheckpointError: the checkpoint is not whole.
        StoreError: the journal's latest version is not readable, or is of another model.
    """
    store.sweep(spec.line, older_than_s=STALE_STAGING_S)
    journaled = ledger.state.latest.get(spec.line)
    entry = (
        store.open(spec.line, journaled)
        if journaled is not None
        else store.latest(spec.line, EntryKind.VERSION)
    )
    if entry is not None:
        entry.require_model(config_digest(text))
        _require_origin(spec, store)
        return entry.version
    if spec.checkpoint is not None:
        from k3ray.model.store_export import import_checkpoint  # imports torch

        return import_checkpoint(store, Path(spec.checkpoint), line=spec.line)
    from k3ray.actors.initial_weights import write_initial_version  # imports torch

    return write_initial_version(store, text, line=spec.line, seed=spec.seed)


def missing_versions(spec: SupernodeSpec, store: WeightStore, ledger: Ledger) -> dict[str, str]:
    """Journaled live versions of the line (but its latest) that the store no longer has, each with
    the reason; they are retired at boot."""
    reasons = {}
    for version in ledger.state.versions:
        if version == ledger.state.latest.get(spec.line):
            continue
        try:
            store.open(ledger.state.versions[version].line, version)
        except StoreError as error:
            reasons[version] = error.message
    return reasons


def _require_origin(spec: SupernodeSpec, store: WeightStore) -> None:
    """A line that began with other weights must not pass for the checkpoint that is asked for."""
    if spec.checkpoint is None:
        return
    for entry in store.entries(spec.line, EntryKind.VERSION):
        origin = entry.manifest.meta.get("origin")
        if entry.version.step == 0 and origin != str(Path(spec.checkpoint).absolute()):
            raise StoreError(
                f"line {spec.line} began with other weights ({origin}), not with {spec.checkpoint}",
                remedy="use another line or another K3RAY_HOME, or drop the checkpoint",
                version=str(entry.version),
            )
