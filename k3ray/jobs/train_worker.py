"""The train worker: a Ray Train worker process that holds the dense stack of one line.

`run_worker` is what Ray Train calls. It builds the loop of `k3ray.train` on the live supernode,
runs it, and leaves its outcome in `result.json` of the run's folder: a typed error is an outcome,
so that Ray Train restarts the worker only when its process died.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import torch

from k3ray.actors.controller_cluster import own_node
from k3ray.actors.ray_calls import call
from k3ray.actors.specs import CONTROLLER_NAME, NAMESPACE
from k3ray.config.jobs import PretrainConfig
from k3ray.config.resolve import resolve_model
from k3ray.errors import ConfigError, K3RayError
from k3ray.ids import Role
from k3ray.jobs.line_authority import ControlWatch, RayLineAuthority
from k3ray.model.group_links import GroupLinks
from k3ray.model.k3 import K3Model
from k3ray.model.packed_data import HELDOUT, TRAIN, PackedDataset
from k3ray.model.self_test import handshake_digest
from k3ray.obs.tracking import Tracker
from k3ray.train.data_order import DataOrder
from k3ray.train.dense_optimizer import DenseOptimizer
from k3ray.train.evaluate import EvalResult, evaluate
from k3ray.train.loop import LoopConfig, TrainLoop, TrainResult
from k3ray.train.observers import ConsoleProgress, EventFile, TrackerObserver
from k3ray.train.remote_experts import RemoteExperts, TrainLimits
from k3ray.train.step import StepParts
from k3ray.transport.zeromq_client import ZeroMqClient
from k3ray.weights.release_layout import check_format
from k3ray.weights.store import WeightStore

RESULT_FILE = "result.json"
PROGRESS_FILE = "progress.log"
NICENESS = 10


def run_worker(job: dict[str, str]) -> None:
    """Train to the end.

    Args:
        job: `config` (PretrainConfig as JSON), `lease_id`, `store_dir`, `run_dir`,
            `tracking_uri`.
    """
    os.nice(NICENESS)
    torch.set_num_threads(1)
    run_dir = Path(job["run_dir"])
    with (run_dir / PROGRESS_FILE).open("a", encoding="utf-8") as progress:

        def say(line: str) -> None:
            progress.write(line + "\n")
            progress.flush()

        try:
            result = _train(PretrainConfig.model_validate_json(job["config"]), job, say)
            outcome: dict[str, Any] = {"result": asdict(result)}
        except K3RayError as error:
            outcome = {"error": base64.b64encode(pickle.dumps(error)).decode()}
    _write_json(run_dir / RESULT_FILE, outcome)


def read_outcome(run_dir: Path) -> dict[str, Any]:
    """What `run_worker` left behind.

    Raises:
        K3RayError: the error that ended it.
        FileNotFoundError: it did not come to an end.
    """
    outcome = json.loads((run_dir / RESULT_FILE).read_text(encoding="utf-8"))
    if "error" in outcome:
        raise pickle.loads(base64.b64decode(outcome["error"]))
    result: dict[str, Any] = outcome["result"]
    return result


def _train(config: PretrainConfig, job: dict[str, str], say: Callable[[str], None]) -> TrainResult:
    spec = config.supernode
    controller = ray.get_actor(CONTROLLER_NAME, namespace=NAMESPACE)
    incarnation = call(
        controller, "register", str(Role.TRAIN_WORKER), f"train-{spec.line}", os.getpid(),
        own_node(), "", peer=CONTROLLER_NAME, limit_s=spec.deadlines.start_s,
    )  # fmt: skip
    run_dir, store = Path(job["run_dir"]), WeightStore(job["store_dir"])
    with ExitStack() as closing:
        console = ConsoleProgress(say)
        closing.callback(console.close)
        events = EventFile(run_dir / "events.jsonl")
        closing.callback(events.close)
        tracker = closing.enter_context(
            Tracker.open(
                run_dir, run_name=f"pretrain-{spec.line}", params=config.model_dump(mode="json"),
                uri=job["tracking_uri"] or None, say=say,
            )
        )  # fmt: skip
        watch = ControlWatch(controller, incarnation)
        closing.callback(watch.close)
        digest = handshake_digest(resolve_model(spec).text_config, spec.numeric_mode)
        links = GroupLinks(
            ZeroMqClient(incarnation, digest=digest),
            connect_s=spec.deadlines.commit_s,
            on_lost=watch.on_lost,
        )
        closing.callback(links.close)
        limits = TrainLimits(call_s=spec.deadlines.prepare_s, rebuild_s=spec.deadlines.rebuild_s)
        experts = RemoteExperts(
            links, watch.plans, line=spec.line, limits=limits, experts=config.experts
        )
        parts = _parts(config, experts)
        loop = TrainLoop(
            parts,
            _loop_config(config),
            authority=RayLineAuthority(
                controller, lease_id=job["lease_id"], line=spec.line, deadlines=spec.deadlines
            ),
            store=store,
            observers=(console, events, TrackerObserver(tracker)),
            evaluate=functools.partial(_evaluate, config, parts),
        )
        return loop.run()


def _parts(config: PretrainConfig, experts: RemoteExperts) -> StepParts:
    cfg = resolve_model(config.supernode).text_config
    source = PackedDataset.open(config.data_dir, split=TRAIN)
    vocab_size = int(source.manifest["tokenizer"]["vocab_size"])
    if vocab_size > cfg.vocab_size:
        raise ConfigError(
            f"the data's tokenizer has {vocab_size} tokens, the model {cfg.vocab_size}",
            remedy=f"curate with vocab_size={cfg.vocab_size} or choose another preset",
        )
    check_format(cfg, config.experts)
    model = K3Model(
        cfg,
        checkpoint_activations=config.checkpoint_activations,
        numeric=config.supernode.numeric_mode,
    )
    data = DataOrder(
        source=source, seed=config.seed, micro_batches=config.micro_batches,
        sequences=config.sequences_per_micro_batch,
    )  # fmt: skip
    return StepParts(
        model=model, dense=DenseOptimizer(model), experts=experts, data=data,
        optimizer=config.optimizer, total_steps=config.steps,
    )  # fmt: skip


def _loop_config(config: PretrainConfig) -> LoopConfig:
    return LoopConfig(
        line=config.supernode.line, seed=config.supernode.seed,
        checkpoint_every=config.checkpoint_every, publish_every=config.publish_every,
        max_attempts_per_step=config.max_attempts_per_step, resume=config.resume,
    )  # fmt: skip


def _evaluate(config: PretrainConfig, parts: StepParts, step: int) -> EvalResult | None:
    heldout = PackedDataset.open(config.data_dir, split=HELDOUT)
    return evaluate(
        parts.model,
        parts.experts.eval_executor(step),
        heldout,
        bytes_per_token=heldout.bytes_per_token,
        max_sequences=config.eval_sequences,
        sequences_per_batch=config.sequences_per_micro_batch,
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
