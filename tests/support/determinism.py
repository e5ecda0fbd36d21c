"""The model, executors and schedules of promise 1: what the tests and the benchmark compare.

Near-ties are planted: two experts of every layer and two words of the vocabulary that hardly
differ, so that one changed bit changes a choice.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import torch

from k3ray.config.presets import PRESETS
from k3ray.model.batch import PackedBatch
from k3ray.model.executor import ExpertExecutor
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.expert_stack import all_experts
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.serve_state import ServeState
from tests.support.direct_client import loud_experts
from tests.support.local_stack import dense_tensors
from tests.support.schedules import VERSION, partitioned_executor, serve_by_schedule

CFG = PRESETS["k3-tiny"].text_config
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 70, 127, 129)
PARTITIONS = (
    ((0, 1, 2, 3, 4, 5, 6, 7),),
    ((4, 5, 6, 7), (0, 1, 2, 3)),
    ((3,), (0, 1, 2, 4, 5, 6, 7)),
    ((7, 2), (5, 0, 4), (6, 1, 3)),
)
NEAR = 1e-7


def near_tie_model() -> K3Model:
    """A model whose choices hang on single bits."""
    model = K3Model(CFG)
    tensors = dense_tensors(CFG, 0, std=0.1)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith(("gate.weight", "lm_head.weight")):
            noise = torch.randn(tensor[0::2].shape, generator=generator) * NEAR
            tensor[1::2] = tensor[0::2] + noise  # every second row hardly differs from the first
        elif name.endswith(("norm.weight", "res_proj.weight", "A_log", "correction_bias")):
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
        if name.endswith("correction_bias"):
            tensor[1::2] = tensor[0::2]
    model.load_state_dict(tensors)
    return model.requires_grad_(requires_grad=False)


def placed_executors(store_dir: Path) -> list[ExpertExecutor]:
    """The same experts: the first executor local, the others over groups."""
    expert_tensors = loud_experts(CFG)
    bank = ExpertBank(CFG, all_experts(CFG))
    bank.load_version(VERSION, expert_tensors)
    remote = [partitioned_executor(CFG, expert_tensors, p, store_dir) for p in PARTITIONS]
    return [LocalExecutor(bank, version=VERSION), *remote]


def tokens(length: int, seed: int) -> tuple[int, ...]:
    """Random tokens."""
    chance = random.Random(1000 * length + seed)
    return tuple(chance.randrange(CFG.vocab_size) for _ in range(length))


def trained(
    model: K3Model, executor: ExpertExecutor, documents: list[tuple[int, ...]]
) -> list[torch.Tensor]:
    """Logits of packed documents by the trainer's forward."""
    lengths = [len(d) for d in documents]
    batch = PackedBatch(
        tokens_T=torch.tensor([t for d in documents for t in d]),
        cu_seqlens=tuple(itertools.accumulate(lengths, initial=0)),
    )
    with torch.no_grad():
        logits_TV = model.logits(model.forward_hidden(batch, executor))
        return list(torch.split(logits_TV, lengths))


def other_bits(
    model: K3Model, executors: list[ExpertExecutor], numbers: Iterable[int]
) -> list[tuple[int, int]]:
    """(schedule, length) of every sequence whose logits are not the trainer's, bit for bit.

    Args:
        numbers: Seeds of random schedules: who is in a batch, in which slot and pages, how it is
            cut into calls, and where the experts are.
    """
    golden = {
        (length, seed): trained(model, executors[0], [tokens(length, seed)])[0]
        for length in LENGTHS
        for seed in range(2)
    }
    state = ServeState(CFG, num_slots=5, num_pages=12)
    wrong = []
    for number in numbers:
        chance = random.Random(number)
        chosen = [
            (chance.choice(LENGTHS), chance.randrange(2)) for _ in range(chance.randint(1, 3))
        ]
        executor = chance.choice(executors)
        served = serve_by_schedule(model, state, executor, [tokens(*c) for c in chosen], chance)
        wrong += [
            (number, key[0])
            for key, logits in zip(chosen, served, strict=True)
            if not torch.equal(logits, golden[key])
        ]
    return wrong
