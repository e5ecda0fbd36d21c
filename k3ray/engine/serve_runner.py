"""`ServeRunner`: K3 models by weight version over one shared serving state.

Spans of one step are grouped by version; a version whose hop fails takes only its own spans down.
`forward`, `score` and `zero` belong to the engine's thread, and so do the executors, which are
made there on first use; versions may be added and dropped by any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.engine.runner import Logits, Work
from k3ray.errors import FencedError, K3RayError, StaleVersionError
from k3ray.model.executor import ExpertExecutor
from k3ray.model.k3 import K3Model
from k3ray.model.serve_state import SeqSpan, ServeState
from k3ray.transport.protocol import Lane

ExecutorFactory = Callable[[str, Lane], ExpertExecutor]
"""Makes the executor of (weight version, lane); called once each, on the engine's thread."""


class ServeRunner:
    """K3 models by version over one shared `ServeState`.

    Args:
        config: Model sizes, equal for all versions.
        num_slots: KDA slots.
        num_pages: MLA pages of 64 tokens.
        executor_factory: Where the routed experts of a version run.
        plan_version: Reads the current plan's version.
        device: Where dense weights and state live.
        numeric: Numeric mode.
    """

    def __init__(
        self,
        config: TextConfig,
        *,
        num_slots: int,
        num_pages: int,
        executor_factory: ExecutorFactory,
        plan_version: Callable[[], int] = lambda: 0,
        device: torch.device | str = "cpu",
        numeric: NumericMode = NumericMode.DETERMINISTIC,
    ) -> None:
        self._config = config
        self._device = torch.device(device)
        self._factory = executor_factory
        self._plan_version = plan_version
        self._models: dict[str, K3Model] = {}
        self._executors: dict[tuple[str, Lane], ExpertExecutor] = {}
        self._lock = threading.Lock()
        self._state = ServeState(
            config,
            num_slots=num_slots,
            num_pages=num_pages,
            device=self._device,
            dtype=torch.float32,
            numeric=numeric,
        )

    def load_version(self, version: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Build the dense model of a version; a version already live is left alone.

        Args:
            version: Weight version text.
            tensors: The whole dense state, by name.

        Raises:
            RuntimeError: a tensor is missing, unknown or has another shape.
        """
        if version in self._models:
            return
        model = K3Model(
            self._config, device=self._device, dtype=torch.float32, numeric=self._state.numeric
        )
        model.load_state_dict(dict(tensors), strict=True)
        model.requires_grad_(requires_grad=False)
        model.eval()
        with self._lock:
            self._models.setdefault(version, model)

    def drop_version(self, version: str) -> None:
        """Forget a version; unknown ones are ignored."""
        with self._lock:
            self._models.pop(version, None)
            for lane in Lane:
                self._executors.pop((version, lane), None)

    def versions(self) -> tuple[str, ...]:
        """Live weight versions, oldest first."""
        with self._lock:
            return tuple(self._models)

    def plan_version(self) -> int:
        """Version of the placement plan in use."""
        return self._plan_version()

    def zero(self, slot: int, pages: tuple[int, ...]) -> None:
        """Zero the state of a slot and pages."""
        with torch.inference_mode():
            self._state.reset_slot(slot)
            self._state.reset_pages(pages)

    def forward(self, works: Sequence[Work]) -> list[Logits | K3RayError]:
        """See `ModelRunner.forward`."""
        by_version: dict[str, list[int]] = {}
        for index, work in enumerate(works):
            by_version.setdefault(work.version, []).append(index)
        results: dict[int, Logits | K3RayError] = {}
        for version, indices in by_version.items():
            try:
                rows = self._run(version, Lane.SERVE, [works[i] for i in indices], all_rows=False)
            except FencedError:
                raise  # this life of the stack is over
            except K3RayError as error:
                results.update(dict.fromkeys(indices, error))
            else:
                results.update(zip(indices, rows, strict=True))
        return [results[index] for index in range(len(works))]

    def score(self, work: Work) -> Logits:
        """See `ModelRunner.score`."""
        return self._run(work.version, Lane.SCORE, [work], all_rows=True)

    def _run(self, version: str, lane: Lane, works: list[Work], *, all_rows: bool) -> Logits:
        model, executor = self._resolve(version, lane)
        spans = [
            SeqSpan(slot=work.slot, pages=work.pages, start=work.start, length=len(work.tokens))
            for work in works
        ]
        with torch.inference_mode():
            tokens_T = torch.tensor(
                [token for work in works for token in work.tokens],
                dtype=torch.int64,
                device=self._device,
            )
            logits = model.forward_serve(tokens_T, spans, self._state, executor, all_rows=all_rows)
            rows: Logits = logits.to(dtype=torch.float32, device="cpu").numpy()
        return rows

    def _resolve(self, version: str, lane: Lane) -> tuple[K3Model, ExpertExecutor]:
        with self._lock:
            model = self._models.get(version)
            executor = self._executors.get((version, lane))
        if model is None:
            raise StaleVersionError(
                f"weight version {version} is not live on this stack",
                remedy="pin a live version (k3ray status) and resubmit",
                version=version,
            )
        if executor is None:
            executor = self._factory(version, lane)
            with self._lock:
                self._executors[version, lane] = executor
        return model, executor
