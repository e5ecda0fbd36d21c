"""`GroupHandler`: the transport operations of one expert group.

A pure dispatcher: it reads messages, calls `ExpertBank` (committed versions, read-only) and
`ExpertTrainer` (master of one line), and writes replies. File work runs in a thread of its own
while the generator yields, so a checkpoint never holds up the serve lane.

Operations (metadata; arrays -> reply arrays), rows and experts int32 [P], latents f32 [N, L];
those of training carry the number of the layout as `layout`, too:
  forward        version, layer; latents, rows, experts -> rows [P, L]
  train_forward  tag, micro_batch, layer; latents, rows, experts -> rows [P, L]
  train_eval     step, layer; latents, rows, experts -> rows [P, L]
  train_backward tag, micro_batch, layer; gradient [P, L] -> gradient of latents [P, L]
  train_norms    tag -> f64 squares in the order of `owned_names`
  train_prepare  tag, update plan -> () with `digest`
  train_apply, train_abort  tag
  train_status   -> () with `has_master` and `step`
  train_load     line, entry or "", seed, step (of a checkpoint)
  train_save, train_publish line, step, path, shard -> ShardInfo as JSON bytes
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import numpy as np
import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import ExpertFormat
from k3ray.errors import K3RayError, StaleVersionError, StoreError, TransportError
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.expert_stack import AnyTensor, ExpertStack, Owned, owned_names
from k3ray.placement.layout import GroupShare, joined
from k3ray.train.expert_trainer import ExpertTrainer, named_arrays
from k3ray.train.step_tag import StepTag, UpdatePlan
from k3ray.transport.protocol import Array, Message
from k3ray.transport.torch_codec import from_array
from k3ray.weights.manifest import EntryKind, ShardInfo
from k3ray.weights.names import MOMENT_SUFFIXES
from k3ray.weights.store import StagedEntry, WeightStore
from k3ray.weights.version import WeightVersion

Reply = Generator[None, None, Message]
T = TypeVar("T")

POLL_S = 0.002
"""How long the worker waits for a file thread before it looks at its lanes again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _StagedVersion:
    """What `train_publish` wrote, still in memory: becomes a version without reading it back.
    `version` is known once a manifest was seen to name exactly the bytes written."""

    step: int
    shard: ShardInfo
    stacks: dict[int, ExpertStack]
    version: str | None = None


class GroupHandler:
    """Handler of one group; see the module docstring. One worker thread calls everything.

    Args:
        cfg: Model sizes.
        shares: What is served and trained here by each live layout's number.
        store: The weight store.
        line: The line whose master trains here.
    """

    def __init__(
        self,
        cfg: TextConfig,
        shares: Mapping[int, GroupShare],
        *,
        store: WeightStore,
        line: str = "main",
    ) -> None:
        self._cfg = cfg
        self._shares = dict(shares)
        self._layout = min(shares)
        self._owned: Owned = shares[self._layout].owned
        self._bank = ExpertBank(cfg, joined(shares.values()))
        self._trainer = ExpertTrainer(cfg, self._owned, line=line)
        self._store = store
        self._line = line
        self._staged: _StagedVersion | None = None
        self._counts: dict[str, int] = {}
        self._ops: dict[str, Callable[[Message], Reply]] = {
            "forward": self._forward,
            "train_forward": self._train_forward,
            "train_eval": self._train_eval,
            "train_backward": self._train_backward,
            "train_norms": self._train_norms,
            "train_prepare": self._train_prepare,
            "train_apply": self._train_apply,
            "train_abort": self._train_abort,
            "train_status": self._train_status,
            "train_load": self._train_load,
            "train_save": self._train_save,
            "train_publish": self._train_publish,
        }

    def __call__(self, message: Message) -> Reply:
        """Serve one request (a `transport.protocol.Handler`).

        Raises:
            TransportError: unknown operation or malformed message.
            StaleVersionError, PlanError, StoreError: see the operations.
        """
        serve = self._ops.get(message.op)
        if serve is None:
            raise TransportError(
                f"unknown operation {message.op!r}",
                remedy=f"client and group run different code; known: {', '.join(self._ops)}",
                operation=message.op,
            )
        self._counts[message.op] = self._counts.get(message.op, 0) + 1
        try:
            if message.op.startswith("train_"):
                self._train_by(_int(message, "layout"))
            return (yield from serve(message))
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise TransportError(
                f"malformed {message.op!r} message: {type(error).__name__}: {error}",
                remedy="client and group run different code; restart the client",
                operation=message.op,
            ) from error

    def versions(self) -> tuple[str, ...]:
        """Loaded versions."""
        return self._bank.versions()

    def missing_names(self, version: str) -> list[str]:
        """Store names of a committed version that must be read to serve it here: all that is held
        but for the copy that `train_publish` kept."""
        staged = self._staged_of(version)
        kept = named_arrays(staged.stacks) if staged is not None else {}
        return [name for name in owned_names(self._bank.owned) if name not in kept]

    def load_version(self, version: str, tensors: Mapping[str, AnyTensor]) -> None:
        """Serve a committed version from the tensors of `missing_names` by store name."""
        staged = self._staged_of(version)
        if staged is None:
            self._bank.load_version(version, tensors)
            return
        if tensors or self._bank.owned != self._owned:
            self._bank.load_version(version, {**named_arrays(staged.stacks), **tensors})
        else:
            self._bank.adopt_version(version, staged.stacks)
        self._staged = None

    def shares(self) -> dict[int, GroupShare]:
        """What is held by each live layout."""
        return dict(self._shares)

    def reshaped(self, version: str, shares: Mapping[int, GroupShare]) -> dict[int, ExpertStack]:
        """A loaded version with the experts of these layouts, new ones read from the store; any
        thread may call this.

        Raises:
            StoreError: the store does not have the version whole.
        """
        held = joined(shares.values())
        have = set(owned_names(self._bank.owned))
        names = [name for name in owned_names(held) if name not in have]
        tensors = self._store.open(self._line, version).read(names) if names else {}
        return self._bank.reshaped(version, held, tensors)

    def hold_layouts(
        self, shares: Mapping[int, GroupShare], versions: Mapping[str, dict[int, ExpertStack]]
    ) -> None:
        """Hold the experts of these layouts and no others; `versions` are the loaded ones with
        them. The master goes when the layout by which it trains goes.

        Raises:
            StaleVersionError: a version was loaded meanwhile; nothing changed.
        """
        self._bank.hold(joined(shares.values()), versions)
        self._shares = dict(shares)
        if self._layout not in shares:
            self._train_by(max(shares))

    def _train_by(self, layout: int) -> None:
        """Training messages of a newer layout end the training by the one before: where homes
        differ, the line goes back to its last checkpoint."""
        if layout == self._layout:
            return
        if layout < self._layout or layout not in self._shares:
            raise StaleVersionError(
                f"layout {layout} is not live here (layouts: {sorted(self._shares)}, training by "
                f"{self._layout})",
                remedy="read the current placement plan",
                layout=layout,
            )
        owned = self._shares[layout].owned
        if owned != self._owned:
            self._owned = owned
            self._trainer = ExpertTrainer(self._cfg, owned, line=self._line)
        self._layout = layout

    def _staged_of(self, version: str) -> _StagedVersion | None:
        """The kept copy, if the store's manifest names exactly the bytes that were written."""
        staged = self._staged
        if staged is None or WeightVersion.parse(version).step != staged.step:
            return None
        if staged.version is None:
            if staged.shard not in self._store.open(self._line, version).manifest.shards:
                return None
            self._staged = staged = replace(staged, version=version)
        return staged if staged.version == version else None

    def drop_version(self, version: str) -> None:
        """Free a retired version; unknown ones are fine."""
        self._bank.drop_version(version)

    def status(self) -> dict[str, Any]:
        """JSON-able: versions, experts by layer, bytes, training step, requests served by op."""
        open_attempt = self._trainer.open_attempt
        return {
            "versions": list(self._bank.versions()),
            "experts": {str(layer): list(held) for layer, held in self._bank.owned.items()},
            "home_experts": {str(layer): list(own) for layer, own in self._owned.items()},
            "size_bytes": self._bank.size_bytes + self._trainer.size_bytes,
            "train": {
                "line": self._line,
                "has_master": self._trainer.has_master,
                "step": self._trainer.committed_step,
                "attempt": open_attempt.attempt if open_attempt else None,
            },
            "served": dict(self._counts),
        }

    def _forward(self, message: Message) -> Reply:
        latents, rows, experts = message.arrays
        result = yield from self._bank.forward(
            _int(message, "layer"), str(message.meta["version"]), _tensor(latents),
            rows.astype(np.int32, copy=False), experts.astype(np.int32, copy=False),
        )  # fmt: skip
        return _reply(message, result.numpy())

    def _train_forward(self, message: Message) -> Reply:
        latents, rows, experts = message.arrays
        result = yield from self._trainer.forward(
            StepTag.from_meta(message.meta), _key(message), _tensor(latents),
            rows.astype(np.int32, copy=False), experts.astype(np.int32, copy=False),
        )  # fmt: skip
        return _reply(message, result.numpy())

    def _train_eval(self, message: Message) -> Reply:
        latents, rows, experts = message.arrays
        result = yield from self._trainer.evaluate(
            _int(message, "layer"), _int(message, "step"), _tensor(latents),
            rows.astype(np.int32, copy=False), experts.astype(np.int32, copy=False),
        )  # fmt: skip
        return _reply(message, result.numpy())

    def _train_backward(self, message: Message) -> Reply:
        result = yield from self._trainer.backward(
            StepTag.from_meta(message.meta), _key(message), _tensor(message.arrays[0])
        )
        return _reply(message, result.numpy())

    def _train_norms(self, message: Message) -> Reply:
        squares = yield from self._trainer.norms(StepTag.from_meta(message.meta))
        return _reply(message, np.array([squares[n] for n in owned_names(self._owned)]))

    def _train_prepare(self, message: Message) -> Reply:
        digest = yield from self._trainer.prepare(
            StepTag.from_meta(message.meta), UpdatePlan.from_meta(message.meta)
        )
        return Message(op=message.op, meta={"digest": digest})

    def _train_apply(self, message: Message) -> Reply:
        yield from ()
        self._trainer.apply(StepTag.from_meta(message.meta))
        return Message(op=message.op)

    def _train_abort(self, message: Message) -> Reply:
        yield from ()
        self._trainer.abort(StepTag.from_meta(message.meta))
        return Message(op=message.op)

    def _train_status(self, message: Message) -> Reply:
        yield from ()
        trainer = self._trainer
        return Message(
            op=message.op,
            meta={"has_master": trainer.has_master, "step": trainer.committed_step},
        )

    def _train_load(self, message: Message) -> Reply:
        entry, owned = str(message.meta["entry"] or ""), self._owned
        experts = ExpertFormat(str(message.meta["experts"]))
        if not entry:
            self._trainer.init(_int(message, "seed"), experts=experts)
            return Message(op=message.op)
        names = [name for moment in ("", *MOMENT_SUFFIXES) for name in owned_names(owned, moment)]
        opened = self._store.open(self._line, entry, EntryKind.CHECKPOINT)
        tensors = yield from _in_thread(lambda: opened.read(names))
        self._trainer.load(tensors, step=_int(message, "step"), experts=experts)
        return Message(op=message.op)

    def _train_save(self, message: Message) -> Reply:
        self._require_step(message)
        tensors = self._trainer.checkpoint_tensors()
        shard = yield from _in_thread(lambda: self._write(message, EntryKind.CHECKPOINT, tensors))
        return _reply(message, _json_bytes(shard))

    def _train_publish(self, message: Message) -> Reply:
        self._require_step(message)
        stacks = self._trainer.weight_stacks()
        tensors = named_arrays(stacks)
        shard = yield from _in_thread(lambda: self._write(message, EntryKind.VERSION, tensors))
        self._staged = _StagedVersion(step=_int(message, "step"), shard=shard, stacks=stacks)
        return _reply(message, _json_bytes(shard))

    def _write(self, message: Message, kind: EntryKind, tensors: Mapping[str, Array]) -> ShardInfo:
        staged = StagedEntry(
            line=self._line, kind=kind, step=_int(message, "step"), path=str(message.meta["path"])
        )
        return self._store.write_shard(staged, str(message.meta["shard"]), tensors)

    def _require_step(self, message: Message) -> None:
        """The master written must be the one that the trainer means."""
        step = _int(message, "step")
        if not self._trainer.has_master or step != self._trainer.committed_step:
            raise StoreError(
                f"asked to write step {step} of line {self._line}, the master here is at "
                f"{self._trainer.committed_step if self._trainer.has_master else 'no step'}",
                remedy="load the last checkpoint in every group and train on from it",
                step=step,
            )


def _in_thread(work: Callable[[], T]) -> Generator[None, None, T]:
    """Run file work beside the worker thread, yielding until it is done."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except (K3RayError, OSError) as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="group-files", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        yield
    if failed:
        raise failed[0]
    return done[0]


def _tensor(array: Array) -> torch.Tensor:
    """Float32 tensor on a received array, which nobody writes to."""
    return from_array(np.ascontiguousarray(array, dtype=np.float32))


def _int(message: Message, key: str) -> int:
    return int(message.meta[key] or 0)


def _key(message: Message) -> tuple[int, int]:
    return _int(message, "micro_batch"), _int(message, "layer")


def _reply(message: Message, array: Array) -> Message:
    return Message(op=message.op, arrays=(array,))


def _json_bytes(shard: ShardInfo) -> Array:
    return np.frombuffer(json.dumps(asdict(shard)).encode(), dtype=np.uint8)
