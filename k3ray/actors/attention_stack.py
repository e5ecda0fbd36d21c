"""`AttentionStack`: the actor that serves: dense weights, engine, sequence state.

Ray carries its life, control methods and finished tokens; the tensors of a layer go over the
transport from the engine's own thread. Nothing here blocks the event loop: the engine is asked
under a short lock, weights are read in a worker thread. If the engine fails the process exits,
and the controller makes a new life of this stack.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict
from typing import Any

import ray
import torch

from k3ray.actors.dense_weights import read_dense
from k3ray.actors.event_signal import EventSignal
from k3ray.actors.plan_holder import PlanHolder
from k3ray.actors.scoring import score_all
from k3ray.actors.specs import StackSpec
from k3ray.actors.stack_executors import StackExecutors
from k3ray.clock import Deadline
from k3ray.control.supervisor import Holding
from k3ray.engine.engine import SCORE_SLOTS, Engine
from k3ray.engine.loop import EngineLoop
from k3ray.engine.request import Request, TokenEvent
from k3ray.engine.scoring import LogProbs
from k3ray.engine.serve_runner import ServeRunner
from k3ray.errors import FencedError, SupernodeError
from k3ray.ids import Role, refuse_lower_term
from k3ray.model.self_test import handshake_digest
from k3ray.obs.log import configure, get_log
from k3ray.placement.plan import PlacementPlan

MAX_POLL_S = 30.0
_LAST_WORDS_S = 1.0
_EXIT_FAILED = 70
_EXIT_FENCED = 71

_log = get_log(__name__)


@ray.remote
class AttentionStack:
    """One life of one stack; see `StackSpec`."""

    def __init__(self, spec: StackSpec) -> None:
        torch.set_num_threads(1)
        configure(role=str(Role.ATTENTION_STACK), incarnation=str(spec.incarnation))
        self._spec = spec
        self._plans = PlanHolder()
        self._controller_term = 0
        self._executors = StackExecutors(spec, self._plans)
        self._started: tuple[Engine, ServeRunner, EventSignal] | None = None
        self._loading = asyncio.Lock()
        self._watched = asyncio.Event()

    async def start(self) -> dict[str, Any]:
        """Test the arithmetic, make the state and start the engine; idempotent. Returns pid, node
        and endpoint (a stack has no data-plane server: "").

        Raises:
            NumericError: see `handshake_digest`.
        """
        if self._started is None:
            spec = self._spec
            handshake_digest(spec.text, spec.numeric_mode)  # now, not under the first request
            runner = ServeRunner(
                spec.text,
                num_slots=spec.engine.max_running + SCORE_SLOTS,
                num_pages=spec.engine.num_pages,
                executor_factory=self._executors,
                plan_version=lambda: self._plans.version,
                numeric=spec.numeric_mode,
            )
            signal = EventSignal(asyncio.get_running_loop())
            engine = Engine(spec.text, spec.engine, runner, on_events=signal.notify)
            EngineLoop(engine, on_fatal=self._die).start()
            self._started = (engine, runner, signal)
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return {"pid": os.getpid(), "node": node, "endpoint": ""}

    async def set_plan(self, plan: PlacementPlan, controller_term: int) -> int:
        """Take a placement plan; returns the version of the newest one held.

        Raises:
            FencedError: the caller is an older controller.
        """
        self._admit(controller_term)
        return self._plans.set(plan)

    async def load_version(self, version: str, controller_term: int) -> str:
        """Read the dense tensors of a committed version from the store and serve it.

        Raises:
            StoreError: not in the store, or damaged.
            FencedError: the caller is an older controller.
        """
        self._admit(controller_term)
        _, runner, _ = self._running()
        async with self._loading:
            if version not in runner.versions():
                spec = self._spec
                tensors = await asyncio.to_thread(
                    read_dense, spec.store_dir, line=spec.line, version=version
                )
                await asyncio.to_thread(runner.load_version, version, tensors)
        return version

    async def drop_version(self, version: str, controller_term: int) -> None:
        """Free a retired version; unknown ones are fine.

        Raises:
            CapacityError: open requests pin it.
            FencedError: the caller is an older controller.
        """
        self._admit(controller_term)
        engine, runner, _ = self._running()
        engine.check_droppable(version)
        runner.drop_version(version)

    async def submit(self, request: Request) -> bool:
        """Take a request; see `Engine.submit` for what it raises."""
        engine, _, _ = self._running()
        return engine.submit(request)

    async def poll(self, request_id: str, after: int, term: int, wait_s: float) -> list[TokenEvent]:
        """Events after position `after` (-1: from the start), as many as there are; waits at
        most min(wait_s, 30) seconds for the first, then returns an empty list.

        Raises:
            UnknownRequestError: not known to this life of the stack.
            FencedError: a higher term of the request has been seen.
        """
        engine, _, signal = self._running()
        deadline = Deadline.after(
            min(wait_s, MAX_POLL_S), operation="poll", peer=str(self._spec.incarnation)
        )
        while True:
            ticket = signal.ticket()
            events = engine.read(request_id, after=after, term=term)
            left_s = deadline.left_s()
            if events or left_s <= 0:
                return events
            try:
                async with asyncio.timeout(left_s):
                    await ticket.wait()
            except TimeoutError:
                return []

    async def cancel(self, request_id: str) -> None:
        """End a request; unknown ones are fine."""
        engine, _, _ = self._running()
        engine.cancel(request_id)

    async def score(
        self, version: str, sequences: list[tuple[int, ...]], wait_s: float
    ) -> list[LogProbs]:
        """Teacher-forced log-probabilities, lane SCORE.

        Returns:
            Per sequence (at most `engine.max_waiting`) [len - 1] float32, of tokens[1:].

        Raises:
            DeadlineError: not done in time; unfinished jobs are dropped.
            CapacityError, ContextLengthError, BadRequestError, K3RayError: see `Engine.score`.
        """
        engine, _, _ = self._running()
        deadline = Deadline.after(wait_s, operation="score", peer=str(self._spec.incarnation))
        return await score_all(engine, version, sequences, deadline)

    async def stats(self) -> dict[str, Any]:
        """`EngineStats` as a dict, with incarnation and pid; JSON-able."""
        engine, _, _ = self._running()
        return {
            "incarnation": str(self._spec.incarnation),
            "pid": os.getpid(),
            "hop_retries": self._executors.num_retries,
            "hop_hedges": self._executors.num_hedges,
            **asdict(engine.stats()),
        }

    async def held(self, controller_term: int) -> Holding:
        """What this life holds; it obeys the caller, a later controller, from here on.

        Raises:
            FencedError: the caller is an older controller.
            SupernodeError: it has not been started.
        """
        self._admit(controller_term)
        _, runner, _ = self._running()
        self._watched.set()
        self._watched = asyncio.Event()
        return Holding(versions=frozenset(runner.versions()), plan=self._plans.version)

    async def block_until_dead(self) -> None:
        """The pending call breaks when this process dies; it returns when another controller has
        taken over."""
        await self._watched.wait()

    def _admit(self, controller_term: int) -> None:
        self._controller_term = refuse_lower_term(
            seen=self._controller_term, offered=controller_term, who=str(Role.CONTROLLER)
        )

    def _running(self) -> tuple[Engine, ServeRunner, EventSignal]:
        if self._started is None:
            raise SupernodeError(
                f"{self._spec.incarnation} has not been started", remedy="call start() first"
            )
        return self._started

    def _die(self, error: BaseException) -> None:
        """End the process, on the engine's thread."""
        fenced = isinstance(error, FencedError)
        _log.error("stack.exit", error=error, fenced=fenced)
        if not fenced:
            # Not a wait for anybody: open long polls carry the error events out meanwhile.
            time.sleep(_LAST_WORDS_S)
        os._exit(_EXIT_FENCED if fenced else _EXIT_FAILED)
