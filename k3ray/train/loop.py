"""`TrainLoop`: steps until the end, with checkpoints, publishing, evaluation and recovery.

The loop holds one fact, the last committed step. A failed attempt is tried again; when a holder
has lost its master the whole line goes back to the last checkpoint (or to the seed) and replays,
which gives the same model, because a step depends on seed, config and data only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from k3ray.errors import CapacityError, K3RayError, StaleVersionError, StepAbortedError
from k3ray.model.init import init_dense
from k3ray.train.authority import Json, LineAuthority, StepRecord
from k3ray.train.evaluate import EvalResult
from k3ray.train.observers import Observer, Progress
from k3ray.train.step import StepParts, run_attempt
from k3ray.train.step_tag import StepTag
from k3ray.weights.manifest import EntryKind, ShardInfo
from k3ray.weights.store import StagedEntry, WeightStore

_SPEED_STEPS = 10
LAST_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopConfig:
    """What happens when. `publish_every` 0: only at the end."""

    line: str
    seed: int
    checkpoint_every: int
    publish_every: int
    max_attempts_per_step: int
    resume: bool
    publish_attempts: int = 20


@dataclass(slots=True, kw_only=True)
class LineState:
    """Where the line stands; `loaded`: the holders have it."""

    loaded: bool = False
    step: int = 0
    num_updates: int = 0
    checkpoint: str | None = None
    checkpoint_step: int = 0
    published_step: int = -1
    version: str | None = None
    failures: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended; losses in nats per token, None when no step ran. `last_loss` is the mean of
    the last `LAST_STEPS` steps, because one small batch says little."""

    step: int
    first_loss: float | None
    last_loss: float | None
    version: str | None
    eval: EvalResult | None


class TrainLoop:
    """See the module docstring.

    Args:
        parts: Model, optimizer, experts, data.
        config: What happens when.
        authority: Journals steps, checkpoints and versions.
        store: Where shards are written and checkpoints read.
        observers: Told of everything.
        evaluate: Held-out evaluation after a step; None for none.
    """

    def __init__(
        self,
        parts: StepParts,
        config: LoopConfig,
        *,
        authority: LineAuthority,
        store: WeightStore,
        observers: Sequence[Observer] = (),
        evaluate: Callable[[int], EvalResult | None] = lambda step: None,
    ) -> None:
        self._parts = parts
        self._config = config
        self._authority = authority
        self._store = store
        self._observers = observers
        self._evaluate = evaluate
        self._recent: deque[tuple[float, int]] = deque(maxlen=_SPEED_STEPS + 1)
        self._first_loss: float | None = None
        self._last_losses: deque[float] = deque(maxlen=LAST_STEPS)
        self._eval: EvalResult | None = None
        self.state = LineState()

    def run(self) -> TrainResult:
        """Train to the last step; checkpoint, publish and evaluate at the end.

        Raises:
            StepAbortedError: a step failed `max_attempts_per_step` times.
            LeaseLostError: the line's lease is over.
            DeadlineError: a lost group was not rebuilt in time.
            StoreError: a checkpoint cannot be read or written.
        """
        self._find_checkpoint()
        ended = False
        while not ended:
            try:
                ended = self._work()
            except StepAbortedError as error:
                self._recover(error)
        state, last = self.state, self._last_losses
        last_loss = sum(last) / len(last) if last else None
        self._tell("ended", step=state.step, first_loss=self._first_loss, loss=last_loss)
        return TrainResult(
            step=state.step, first_loss=self._first_loss, last_loss=last_loss,
            version=state.version, eval=self._eval,
        )  # fmt: skip

    def _work(self) -> bool:
        """The next piece of work; whether it was the last. Everything here may be repeated."""
        state, config = self.state, self._config
        if not state.loaded:
            self._restore()
        at_end = state.step >= self._parts.total_steps
        if state.step > 0 and (at_end or state.step % config.checkpoint_every == 0):
            self._checkpoint()
        every = config.publish_every
        if state.step > 0 and (at_end or (every > 0 and state.step % every == 0)):
            self._publish()
        if at_end:
            self._evaluate_now()
        else:
            self._advance()
        return at_end

    def _recover(self, error: StepAbortedError) -> None:
        """After a failure: wait for the holders, and go back if one lost its master."""
        state = self.state
        state.failures[state.step] = state.failures.get(state.step, 0) + 1
        self._tell(
            "aborted", step=state.step + 1, failures=state.failures[state.step], reason=str(error)
        )
        if state.failures[state.step] >= self._config.max_attempts_per_step:
            raise error
        if state.loaded and not self._parts.experts.settle(state.step):
            state.loaded = False
            self._tell("rolled_back", step=state.step, to_step=state.checkpoint_step)

    def _find_checkpoint(self) -> None:
        line = self._config.line
        entry = self._store.latest(line, EntryKind.CHECKPOINT) if self._config.resume else None
        version = self._store.latest(line, EntryKind.VERSION)
        if entry is not None:
            self.state.checkpoint = entry.name
            self.state.checkpoint_step = entry.manifest.step
            if version is not None and version.manifest.step == entry.manifest.step:
                self.state.published_step = entry.manifest.step
                self.state.version = str(version.version)
        self._tell(
            "resumed" if entry else "started",
            step=self.state.checkpoint_step, checkpoint=self.state.checkpoint,
        )  # fmt: skip

    def _restore(self) -> None:
        """Load the last checkpoint everywhere, or the seed's fresh weights."""
        parts, state = self._parts, self.state
        if state.checkpoint is None:
            init_dense(parts.model, self._config.seed)
            parts.dense.reset_moments()
            state.num_updates = 0
        else:
            entry = self._store.open(self._config.line, state.checkpoint, EntryKind.CHECKPOINT)
            parts.dense.load(entry.read(parts.dense.names(moments=True)))
            state.num_updates = int(entry.manifest.meta["num_updates"] or 0)
        state.step = state.checkpoint_step
        parts.experts.load(state.checkpoint, step=state.step, seed=self._config.seed)
        state.loaded = True
        self._recent.clear()

    def _advance(self) -> None:
        """One attempt at the next step."""
        step = self.state.step + 1
        attempt = self._authority.begin_attempt(step)
        tag = StepTag(line=self._config.line, step=step, attempt=attempt)
        if not self._recent:
            self._recent.append((time.monotonic(), 0))
        record: list[StepRecord] = []
        try:
            run_attempt(
                self._parts, tag, num_updates=self.state.num_updates,
                commit=lambda r: self._commit(r, record),
            )  # fmt: skip
        except StepAbortedError:
            if not record:  # after the commit there is nothing to abort
                self._parts.dense.zero_grad()
                self._parts.experts.abort(tag)
            raise
        self._report(record[0])

    def _commit(self, record: StepRecord, committed: list[StepRecord]) -> None:
        self._authority.commit_step(record)
        committed.append(record)
        self.state.step = record.step
        self.state.num_updates = record.num_updates

    def _evaluate_now(self) -> None:
        result = self._eval = self._evaluate(self.state.step)
        if result is not None:
            self._tell(
                "eval", step=self.state.step, nats_per_token=result.nats_per_token,
                bits_per_byte=result.bits_per_byte, tokens=result.num_tokens,
            )  # fmt: skip

    def _checkpoint(self) -> None:
        state = self.state
        if state.checkpoint is not None and state.checkpoint_step == state.step:
            return
        staged = self._authority.begin_checkpoint(state.step)
        shards = self._write(staged, moments=True)
        meta = {"num_updates": state.num_updates, "seed": self._config.seed}
        state.checkpoint = self._authority.commit_checkpoint(staged, shards, meta)
        state.checkpoint_step = state.step
        self._tell("checkpoint", step=state.step, entry=state.checkpoint)

    def _publish(self) -> None:
        state = self.state
        if state.published_step == state.step:
            return
        staged = self._admitted(lambda: self._authority.begin_publish(state.step))
        shards = self._write(staged, moments=False)
        meta = {"num_updates": state.num_updates}
        try:
            state.version = self._authority.commit_publish(staged, shards, meta)
        except StaleVersionError as error:
            raise StepAbortedError(
                f"publishing step {state.step} failed: {error.message}",
                remedy="it is tried again", reason="not_activated",
            ) from error  # fmt: skip
        state.published_step = state.step
        self._tell("published", step=state.step, version=state.version)

    def _write(self, staged: StagedEntry, *, moments: bool) -> list[ShardInfo]:
        """Dense shard from here, expert shards from their homes."""
        try:
            tensors = self._parts.dense.named_tensors(moments=moments)
            shards = [self._store.write_shard(staged, "dense", tensors)]
            experts = self._parts.experts
            return shards + (experts.save(staged) if moments else experts.publish(staged))
        except K3RayError:
            self._store.discard(staged)
            raise

    def _admitted(self, begin: Callable[[], StagedEntry]) -> StagedEntry:
        """Wait, saying so, while open requests pin the older versions."""
        for _ in range(self._config.publish_attempts - 1):
            try:
                return begin()
            except CapacityError as error:
                self._tell("publish_waits", step=self.state.step, reason=str(error))
        return begin()

    def _report(self, record: StepRecord) -> None:
        """Tell observers and the authority about a committed step."""
        self._first_loss = record.loss if self._first_loss is None else self._first_loss
        if record.loss is not None:  # a skipped step has none
            self._last_losses.append(record.loss)
        self._recent.append((time.monotonic(), record.num_tokens))
        elapsed_s = max(1e-9, self._recent[-1][0] - self._recent[0][0])
        tokens = sum(count for _, count in self._recent) - self._recent[0][1]
        step_s = elapsed_s / (len(self._recent) - 1)
        progress = Progress(
            record=record, total_steps=self._parts.total_steps, tokens_per_s=tokens / elapsed_s,
            eta_s=step_s * (self._parts.total_steps - record.step),
        )  # fmt: skip
        for observer in self._observers:
            observer.on_step(progress)
        self._authority.report({"state": "training", **progress.metrics()})

    def _tell(self, event: str, **fields: Json) -> None:
        for observer in self._observers:
            observer.on_event(event, fields)
