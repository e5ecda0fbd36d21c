"""Teacher-forced scoring beside generation: one chunk of one sequence per engine step.

A score job holds its own slot and pages (slot from a reserve, so scoring never takes a running
request's place) and advances by aligned chunks. The queue is bounded; a failed hop starts the job
over once. Entry point: `ScoreQueue.advance`, called by the engine's thread.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from k3ray.engine.blocks import PAGE_TOKENS, Holding, StatePool, pages_for
from k3ray.engine.runner import ModelRunner, Work
from k3ray.engine.scheduler import chunk_length
from k3ray.errors import CapacityError, ContextLengthError, K3RayError, NumericError
from k3ray.ops.logprobs import token_logprobs

LogProbs = npt.NDArray[np.float32]


@dataclass(slots=True, kw_only=True, eq=False)
class ScoreJob:
    """Tokens to score under a version; `logprobs[i]` is of `tokens[i + 1]` given those before."""

    version: str
    tokens: tuple[int, ...]
    future: Future[LogProbs]
    computed: int = 0
    failures: int = 0
    holding: Holding | None = None
    parts: list[LogProbs] = field(default_factory=list)


class ScoreQueue:
    """Bounded queue of score jobs.

    Args:
        runner: Where the model is.
        pool: Shared slots and pages.
        chunk_tokens: Tokens per step, a multiple of 64.
        max_jobs: Bound of the queue.
        max_context: Longest sequence, in tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        pool: StatePool,
        *,
        chunk_tokens: int,
        max_jobs: int,
        max_context: int,
    ) -> None:
        self._runner = runner
        self._pool = pool
        self._chunk_tokens = chunk_tokens
        self._max_jobs = max_jobs
        self._max_context = min(max_context, pool.num_pages * PAGE_TOKENS)
        self._jobs: deque[ScoreJob] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, version: str, tokens: tuple[int, ...]) -> Future[LogProbs]:
        """Queue a job of at least two tokens; its future gets [len(tokens) - 1] float32.

        Raises:
            CapacityError: the queue is full.
            ContextLengthError: too long for the model or the pages.
        """
        if len(tokens) > self._max_context:
            raise ContextLengthError(
                f"{len(tokens)} tokens to score exceed the limit of {self._max_context}",
                remedy="split the document",
                limit=self._max_context,
            )
        with self._lock:
            if len(self._jobs) >= self._max_jobs:
                raise CapacityError(
                    f"{len(self._jobs)} score jobs are queued, the bound is {self._max_jobs}",
                    remedy="retry in 1 s",
                    retry_after_s=1.0,
                )
            job = ScoreJob(version=version, tokens=tokens, future=Future())
            self._jobs.append(job)
        return job.future

    def uses(self, version: str) -> bool:
        """Whether a queued job needs the version."""
        with self._lock:
            return any(job.version == version for job in self._jobs)

    def advance(self) -> bool:
        """Run one chunk of the oldest job; returns whether there was progress to make."""
        with self._lock:
            job = self._jobs[0] if self._jobs else None
        if job is None:
            return False
        if job.future.cancelled():
            self._end(job)
            return True
        if job.holding is None:
            num_pages = pages_for(len(job.tokens))
            if not self._pool.fits(num_pages):
                self._pool.scrub()
            if not self._pool.fits(num_pages):
                return False
            job.holding = self._pool.allocate(num_pages)
        try:
            self._chunk(job, job.holding)
        except NumericError as error:
            self._end(job, error=error, quarantine=True)
        except K3RayError as error:
            self._fail(job, error)
        return True

    def fail_all(self, error: K3RayError) -> None:
        """End every job with `error`."""
        while self._jobs:
            self._end(self._jobs[0], error=error)

    def _chunk(self, job: ScoreJob, holding: Holding) -> None:
        length = chunk_length(
            computed=job.computed, known=len(job.tokens), limit=self._chunk_tokens
        )
        end = job.computed + length
        logits_TV = self._runner.score(
            Work(
                version=job.version,
                slot=holding.slot,
                pages=holding.pages,
                start=job.computed,
                tokens=list(job.tokens[job.computed : end]),
            )
        )
        if not np.isfinite(logits_TV).all():
            raise NumericError(
                f"logits of tokens {job.computed} to {end - 1} are not finite",
                remedy="check the weight version for NaN",
                version=job.version,
            )
        targets_T = np.asarray(job.tokens[job.computed + 1 : end + 1], dtype=np.int64)
        job.parts.append(token_logprobs(logits_TV[: targets_T.shape[0]], targets_T))
        job.computed = end
        if end == len(job.tokens):
            self._end(job)

    def _fail(self, job: ScoreJob, error: K3RayError) -> None:
        job.failures += 1
        if job.failures > 1:
            self._end(job, error=error)
            return
        if job.holding is not None:
            self._pool.release(job.holding)
        job.holding = None
        job.computed = 0
        job.parts.clear()

    def _end(
        self, job: ScoreJob, *, error: K3RayError | None = None, quarantine: bool = False
    ) -> None:
        with self._lock:
            self._jobs.remove(job)
        if job.holding is not None:
            if quarantine:
                self._pool.quarantine(job.holding)
            else:
                self._pool.release(job.holding)
        if job.future.cancelled() or not job.future.set_running_or_notify_cancel():
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(np.concatenate(job.parts))
