"""Promise 1 by bits: a token's logits do not depend on how, where or beside whom it is computed.

Golden is the trainer's forward of one document alone. Near-ties are planted: two experts of every
layer and two words of the vocabulary that hardly differ, so that one changed bit changes a choice.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from k3ray.config.presets import PRESETS
from k3ray.config.supernode import EngineConfig
from k3ray.engine.request import Request, SamplingParams
from k3ray.model.batch import PackedBatch
from k3ray.model.executor import ExpertExecutor
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.expert_stack import all_experts
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.serve_state import ServeState
from k3ray.ops.logprobs import token_logprobs
from tests.support.direct_client import loud_experts
from tests.support.local_stack import dense_tensors, local_bank, local_engine
from tests.support.schedules import VERSION, partitioned_executor, serve_by_schedule

CFG = PRESETS["k3-tiny"].text_config
NUM_SCHEDULES = 80
LENGTHS = (1, 2, 3, 17, 63, 64, 65, 70, 127, 129)
PARTITIONS = (
    ((0, 1, 2, 3, 4, 5, 6, 7),),
    ((4, 5, 6, 7), (0, 1, 2, 3)),
    ((3,), (0, 1, 2, 4, 5, 6, 7)),
    ((7, 2), (5, 0, 4), (6, 1, 3)),
)
NEAR = 1e-7


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # part of the numeric mode


@pytest.fixture(scope="module")
def model() -> K3Model:
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


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> list[ExpertExecutor]:
    """One local, the others over groups."""
    expert_tensors = loud_experts(CFG)
    bank = ExpertBank(CFG, all_experts(CFG))
    bank.load_version(VERSION, expert_tensors)
    store: Path = tmp_path_factory.mktemp("store")
    remote = [partitioned_executor(CFG, expert_tensors, p, store) for p in PARTITIONS]
    return [LocalExecutor(bank, version=VERSION), *remote]


def tokens(length: int, seed: int) -> tuple[int, ...]:
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
        return list(model.logits(model.forward_hidden(batch, executor)).split(lengths))


def test_random_schedules_give_the_trainers_bits(
    model: K3Model, executors: list[ExpertExecutor]
) -> None:
    golden = {
        (length, seed): trained(model, executors[0], [tokens(length, seed)])[0]
        for length in LENGTHS
        for seed in range(2)
    }
    state = ServeState(CFG, num_slots=5, num_pages=12)
    for number in range(NUM_SCHEDULES):
        chance = random.Random(number)
        chosen = [
            (chance.choice(LENGTHS), chance.randrange(2)) for _ in range(chance.randint(1, 3))
        ]
        executor = chance.choice(executors)
        served = serve_by_schedule(model, state, executor, [tokens(*c) for c in chosen], chance)
        for key, logits in zip(chosen, served, strict=True):
            assert torch.equal(logits, golden[key]), (number, key)


def test_documents_packed_at_any_offset(model: K3Model, executors: list[ExpertExecutor]) -> None:
    for number in range(40):
        chance = random.Random(number)
        documents = [
            tokens(chance.choice(LENGTHS), chance.randrange(9)) for _ in range(chance.randint(2, 6))
        ]
        packed = trained(model, chance.choice(executors), documents)
        for document, logits in zip(documents, packed, strict=True):
            assert torch.equal(logits, trained(model, executors[0], [document])[0])


def test_near_ties_are_there_and_choices_do_not_flip(
    model: K3Model, executors: list[ExpertExecutor]
) -> None:
    sequences = [tokens(length, 5) for length in (129, 65, 64)]
    golden = trained(model, executors[0], sequences)
    top = torch.cat(golden).topk(2).values
    gaps = top[:, 0] - top[:, 1]
    assert (gaps < 1e-6).float().mean() > 0.5
    state = ServeState(CFG, num_slots=4, num_pages=10)
    for number in range(20):
        chance = random.Random(number)
        served = serve_by_schedule(model, state, chance.choice(executors), sequences, chance)
        for logits, want in zip(served, golden, strict=True):
            assert torch.equal(logits.argmax(-1), want.argmax(-1))
            assert torch.equal(logits, want)


def test_sampled_tokens_carry_the_trainers_bits() -> None:
    """Sampled by the engine among others, then teacher-forced by the trainer's forward."""
    config = EngineConfig(max_running=6, max_waiting=32, num_pages=64, step_token_budget=160)
    engine = local_engine(CFG, config)
    runner_model = K3Model(CFG)
    runner_model.load_state_dict(dense_tensors(CFG, 0, std=0.1))
    executor = LocalExecutor(local_bank(CFG, {"v1": 0}), version="v1")
    base = Request(
        request_id="", prompt=tokens(50, 0), seed=1, version="v1",
        sampling=SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True),
    )  # fmt: skip
    requests = [
        replace(base, request_id=f"r{i}", prompt=tokens(length, 7), seed=i)
        for i, length in enumerate((1, 40, 63, 64, 65, 130))
    ]
    for request in requests:
        engine.submit(request)
    while engine.step():
        pass
    for request in requests:
        events = engine.read(request.request_id, after=-1, term=1)
        sampled = [e.token for e in events if e.token is not None]
        assert len(sampled) == 40
        document = (*request.prompt, *sampled)
        logits = trained(runner_model, executor, [document])[0]
        rows = logits[len(request.prompt) - 1 : -1].numpy()
        want = token_logprobs(rows, np.array(sampled))
        assert [e.logprob for e in events if e.token is not None] == want.tolist()
