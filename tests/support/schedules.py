"""Random serving schedules: how prompts are cut into calls, who shares a batch, in which slot."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from k3ray.config.model import TextConfig
from k3ray.model.disaggregated import DisaggregatedExecutor
from k3ray.model.executor import ExpertExecutor
from k3ray.model.group_links import FixedPlan, GroupLinks
from k3ray.model.k3 import K3Model
from k3ray.model.serve_state import SeqSpan, ServeState
from tests.support.direct_client import serve_partition

PAGE = 64
VERSION = "main@1-aaaaaaaaaaaa"


@dataclass(slots=True)
class Served:
    """One sequence on its way through a schedule."""

    tokens: tuple[int, ...]
    slot: int
    pages: tuple[int, ...]
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def serve_by_schedule(
    model: K3Model,
    state: ServeState,
    executor: ExpertExecutor,
    sequences: Sequence[Sequence[int]],
    chance: random.Random,
) -> list[torch.Tensor]:
    """Logits [length, V] of every sequence, teacher-forced by a random schedule.

    Every call advances a random subset of the sequences, in random order, each by one token or by
    a random longer span; slots and pages are random too.
    """
    num_slots = state.recurrent_ANHKV.shape[1]
    free = list(range(state.latents_MGSC.shape[1]))
    chance.shuffle(free)
    slots = chance.sample(range(num_slots), len(sequences))
    served = []
    for tokens, slot in zip(sequences, slots, strict=True):
        pages = tuple(free.pop() for _ in range(-(-len(tokens) // PAGE)))
        state.reset_slot(slot)
        state.reset_pages(pages)
        served.append(Served(tokens=tuple(tokens), slot=slot, pages=pages))
    while left := [s for s in served if s.done < len(s.tokens)]:
        chosen = chance.sample(left, chance.randint(1, len(left)))
        lengths = [_span(chance, len(s.tokens) - s.done) for s in chosen]
        tokens = [
            t for s, n in zip(chosen, lengths, strict=True) for t in s.tokens[s.done : s.done + n]
        ]
        spans = [
            SeqSpan(slot=s.slot, pages=s.pages, start=s.done, length=n)
            for s, n in zip(chosen, lengths, strict=True)
        ]
        logits = model.forward_serve(torch.tensor(tokens), spans, state, executor, all_rows=True)
        for s, rows in zip(chosen, torch.split(logits, lengths), strict=True):
            s.logits.append(rows)
            s.done += len(rows)
    return [torch.cat(s.logits) for s in served]


def _span(chance: random.Random, left: int) -> int:
    kind = chance.random()
    if kind < 0.4:
        return 1
    return chance.randint(1, min(left, 17 if kind < 0.6 else left))


def partitioned_executor(
    cfg: TextConfig,
    tensors: Mapping[str, torch.Tensor],
    partition: Sequence[Sequence[int]],
    store_dir: Path,
) -> DisaggregatedExecutor:
    """An executor over expert groups with these experts of every layer, in the caller's thread."""
    client, plan = serve_partition(cfg, tensors, partition, store_dir, version=VERSION)
    return DisaggregatedExecutor(GroupLinks(client), FixedPlan(plan), version=VERSION)
