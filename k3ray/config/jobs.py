"""Configs of the pipelines: `CurateConfig` and `PretrainConfig`."""

from __future__ import annotations

from pydantic import Field

from k3ray.config.base import Strict
from k3ray.config.numeric import ExpertFormat
from k3ray.config.supernode import SupernodeSpec


class CurateConfig(Strict):
    """Files -> clean -> exact dedup -> tokenizer -> packed shards.

    `sources` are directories or globs; the word "python" stands for the running Python
    installation (standard library, site-packages, docstrings, pydoc topics).
    """

    sources: tuple[str, ...] = ("python",)
    out_dir: str
    extensions: tuple[str, ...] = (".py", ".md", ".rst", ".txt")
    max_total_bytes: int = Field(default=64 * 1024 * 1024, gt=0)
    max_file_bytes: int = Field(default=1024 * 1024, gt=0)
    min_chars: int = Field(default=64, ge=0)
    heldout_fraction: float = Field(default=0.05, ge=0, le=0.5)
    vocab_size: int = Field(default=4352, ge=512)
    tokenizer_sample_bytes: int = Field(default=8 * 1024 * 1024, gt=0)
    sequence_length: int = Field(default=512, gt=1)
    shard_sequences: int = Field(default=1024, gt=0)
    seed: int = Field(default=0, ge=0)
    num_workers: int = Field(default=2, ge=1)


class OptimizerConfig(Strict):
    """AdamW with linear warm-up and cosine decay."""

    peak_lr: float = Field(default=2e-3, gt=0)
    min_lr: float = Field(default=2e-4, ge=0)
    warmup_steps: int = Field(default=20, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.95, ge=0, lt=1)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)


class PretrainConfig(Strict):
    """Pretraining of one line on packed shards, experts trained where they live.

    `experts` other than fp32 is quantisation-aware: the forward computes with weights rounded to
    that format, gradients pass straight through to the float32 master, and the rounded weights are
    published.
    """

    data_dir: str
    supernode: SupernodeSpec = SupernodeSpec()
    steps: int = Field(default=200, gt=0)
    micro_batches: int = Field(default=1, ge=1)
    sequences_per_micro_batch: int = Field(default=4, ge=1)
    seed: int = Field(default=0, ge=0)
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint_activations: bool = False
    experts: ExpertFormat = ExpertFormat.FP32
    checkpoint_every: int = Field(default=100, gt=0)
    publish_every: int = Field(default=0, ge=0)
    eval_sequences: int = Field(default=64, ge=0)
    max_attempts_per_step: int = Field(default=5, ge=1)
    resume: bool = True
    run_dir: str | None = None
    tracking_uri: str | None = None
