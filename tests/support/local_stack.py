"""A real engine in this process: K3 model, all experts beside it, fresh weights by seed."""

from __future__ import annotations

import torch

from k3ray.config.model import TextConfig
from k3ray.config.numeric import NumericMode
from k3ray.config.supernode import EngineConfig
from k3ray.engine.engine import SCORE_SLOTS, Engine
from k3ray.engine.serve_runner import ServeRunner
from k3ray.model.expert_bank import ExpertBank
from k3ray.model.init import init_dense, init_expert
from k3ray.model.k3 import K3Model
from k3ray.model.local_executor import LocalExecutor
from k3ray.transport.protocol import Lane
from k3ray.weights.names import expert_tensor_name


def dense_tensors(cfg: TextConfig, seed: int, *, std: float = 0.02) -> dict[str, torch.Tensor]:
    """Dense weights of a fresh model; a larger `std` makes its distributions less flat."""
    model = K3Model(cfg, device="cpu")
    init_dense(model, seed, std=std)
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def local_bank(cfg: TextConfig, seeds: dict[str, int]) -> ExpertBank:
    """Every expert of every version, `seeds` by version text."""
    everyone = tuple(range(cfg.num_experts))
    bank = ExpertBank(cfg, dict.fromkeys(cfg.moe_layers, everyone))
    for version, seed in seeds.items():
        tensors: dict[str, torch.Tensor] = {}
        for layer in cfg.moe_layers:
            for expert in everyone:
                weights = init_expert(cfg, layer, expert, seed)
                tensors[expert_tensor_name(layer, expert, "w1")] = weights.w1_FL
                tensors[expert_tensor_name(layer, expert, "w3")] = weights.w3_FL
                tensors[expert_tensor_name(layer, expert, "w2")] = weights.w2_LF
        bank.load_version(version, tensors)
    return bank


def local_runner(
    cfg: TextConfig,
    config: EngineConfig,
    *,
    seeds: dict[str, int],
    std: float = 0.1,
    numeric: NumericMode = NumericMode.DETERMINISTIC,
) -> ServeRunner:
    """A runner with one version per seed, routed experts in this process."""
    bank = local_bank(cfg, seeds)

    def make_executor(version: str, lane: Lane) -> LocalExecutor:
        return LocalExecutor(bank, version=version)

    runner = ServeRunner(
        cfg,
        num_slots=config.max_running + SCORE_SLOTS,
        num_pages=config.num_pages,
        executor_factory=make_executor,
        numeric=numeric,
    )
    for version, seed in seeds.items():
        runner.load_version(version, dense_tensors(cfg, seed, std=std))
    return runner


def local_engine(
    cfg: TextConfig,
    config: EngineConfig,
    *,
    seeds: dict[str, int] | None = None,
    numeric: NumericMode = NumericMode.DETERMINISTIC,
) -> Engine:
    """An engine over `local_runner`; version "v1" by default."""
    runner = local_runner(cfg, config, seeds=seeds or {"v1": 0}, numeric=numeric)
    return Engine(cfg, config, runner)
