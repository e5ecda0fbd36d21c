"""Promise 1 by bits: a token's logits do not depend on how, where or beside whom it is computed.

Golden is the trainer's forward of one document alone; see `tests/support/determinism.py`.
`make bench-determinism` runs 500 schedules.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from k3ray.config.supernode import EngineConfig
from k3ray.engine.request import Request, SamplingParams
from k3ray.model.executor import ExpertExecutor
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.model.serve_state import ServeState
from k3ray.ops.logprobs import token_logprobs
from tests.support.determinism import (
    CFG,
    LENGTHS,
    near_tie_model,
    other_bits,
    placed_executors,
    tokens,
    trained,
)  # fmt: skip
from tests.support.local_stack import dense_tensors, local_bank, local_engine
from tests.support.schedules import serve_by_schedule

NUM_SCHEDULES = 80


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # part of the numeric mode


@pytest.fixture(scope="module")
def model() -> K3Model:
    return near_tie_model()


@pytest.fixture(scope="module")
def executors(tmp_path_factory: pytest.TempPathFactory) -> list[ExpertExecutor]:
    return placed_executors(tmp_path_factory.mktemp("store"))


def test_random_schedules_give_the_trainers_bits(
    model: K3Model, executors: list[ExpertExecutor]
) -> None:
    assert other_bits(model, executors, range(NUM_SCHEDULES)) == []


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
