"""`Sequence`: one request inside the engine, from waiting to finished.

`tokens` is prompt + generated; `computed` of them are in the state. A sequence samples when all
its known tokens are computed. What it must never lose is in `request` and `tokens`: with
`computed` set back to 0 on a zeroed holding it starts over and goes on with the same tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from k3ray.engine.blocks import Holding, pages_for
from k3ray.engine.request import FinishReason, Request


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Mutable progress of one request; owned by the engine.

    Args:
        request: What was asked.
        tokens: Prompt and generated tokens, emitted ones included.
        num_pages: Pages for prompt + max_tokens, reserved as a whole at admission.
        counts: How often each token was generated, for penalties.
        computed: Leading tokens whose state is in the holding.
        failures: Failed steps since the last token.
    """

    request: Request
    tokens: list[int]
    num_pages: int
    counts: Counter[int]
    computed: int = 0
    holding: Holding | None = None
    finish: FinishReason | None = None
    failures: int = 0
    stop_tokens: frozenset[int] = field(default_factory=frozenset)

    @property
    def position(self) -> int:
        """Index of the next generated token, emitted ones counted."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def left(self) -> int:
        """Known tokens not yet in the state."""
        return len(self.tokens) - self.computed

    def append(self, token: int) -> None:
        """Add a sampled token."""
        self.tokens.append(token)
        self.counts[token] += 1
        self.failures = 0

    def natural_end(self) -> FinishReason | None:
        """STOP or LENGTH if the tokens generated so far end the request, else None."""
        position = self.position
        if position and self.tokens[-1] in self.stop_tokens:
            return FinishReason.STOP
        if position >= self.request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


def new_sequence(request: Request, *, eos_token_id: int) -> Sequence:
    """Make the waiting sequence of a request."""
    sampling = request.sampling
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        stops.add(eos_token_id)
    return Sequence(
        request=request,
        tokens=[*request.prompt, *request.emitted],
        num_pages=pages_for(len(request.prompt) + max(sampling.max_tokens, len(request.emitted))),
        counts=Counter(request.emitted),
        stop_tokens=frozenset(stops),
    )
