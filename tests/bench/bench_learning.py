"""Training learns: `k3-nano` on the quickstart's corpus in one process, against simple models.

Bits per byte on held-out packages, of the model after its last step and of a byte unigram, a token
unigram, and zstd at level 19 with the training text as its dictionary. The model and zstd read the
same held-out sequences; zstd compresses each on its own and its frame's header is not counted.
`make bench-learning`; about twenty minutes with the default steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import zstandard
from bench_rows import record

from k3ray.config.jobs import OptimizerConfig
from k3ray.config.numeric import ExpertFormat, NumericMode
from k3ray.config.presets import PRESETS
from k3ray.jobs.pretrain import baselines
from k3ray.model.init import init_dense
from k3ray.model.k3 import K3Model
from k3ray.model.packed_data import HELDOUT, TRAIN, PackedDataset
from k3ray.text.tokenizer import K3Tokenizer
from k3ray.train.data_order import DataOrder
from k3ray.train.dense_optimizer import DenseOptimizer
from k3ray.train.evaluate import evaluate
from k3ray.train.expert_side import LocalExperts
from k3ray.train.step import StepParts, run_attempt
from k3ray.train.step_tag import StepTag
from k3ray.weights.store import WeightStore

EVAL_SEQUENCES, EVAL_EVERY = 64, 100
OPTIMIZER = OptimizerConfig(peak_lr=3e-3, min_lr=3e-4, warmup_steps=50)


def curated(root: Path) -> Path:
    """The quickstart's data set, made here if it is not there."""
    if not (root / "manifest.json").exists():
        config = "pipelines/configs/curate_python.yaml"
        command = [sys.executable, "-m", "pipelines.curate", "--config", config, f"out_dir={root}"]
        subprocess.run(command, check=True, timeout=1800)
    return root


def zstd_bits_per_byte(data_dir: Path, heldout: PackedDataset) -> float:
    """Bits per byte of the evaluated held-out sequences, given all training text."""
    tokenizer = K3Tokenizer.load(heldout.tokenizer_file)
    train = PackedDataset.open(data_dir, split=TRAIN)
    text = b"".join(
        tokenizer.decode_bytes(train.tokens(i).tolist()) for i in range(train.num_sequences)
    )
    dictionary = zstandard.ZstdCompressionDict(text, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
    window = max(zstandard.WINDOWLOG_MIN, min(27, len(text).bit_length() + 1))
    parameters = zstandard.ZstdCompressionParameters.from_level(
        19, window_log=window, write_checksum=0, write_content_size=0, write_dict_id=0
    )
    compressor = zstandard.ZstdCompressor(dict_data=dictionary, compression_params=parameters)
    packed = plain = 0
    for index in range(min(EVAL_SEQUENCES, heldout.num_sequences)):
        raw = tokenizer.decode_bytes(heldout.tokens(index).tolist())
        packed += len(compressor.compress(raw)) - 6  # the magic number and the frame's descriptor
        plain += len(raw)
    return 8 * packed / plain


def train(parts: StepParts, steps: int, heldout: PackedDataset) -> list[dict[str, float]]:
    """Train; the curve: step, mean loss since the last point, held-out bits per byte, seconds."""
    curve: list[dict[str, float]] = []
    losses: list[float] = []
    started_s = time.monotonic()
    for step in range(1, steps + 1):
        record_ = run_attempt(
            parts, StepTag(line="main", step=step, attempt=1), num_updates=step - 1,
            commit=lambda _: None,
        )  # fmt: skip
        losses.append(record_.loss if record_.loss is not None else float("nan"))
        if step % EVAL_EVERY and step != steps:
            continue
        found = evaluate(
            parts.model, parts.experts.eval_executor(step), heldout,
            bytes_per_token=heldout.bytes_per_token, max_sequences=EVAL_SEQUENCES,
            sequences_per_batch=8,
        )  # fmt: skip
        assert found is not None
        point = {
            "step": step, "loss": round(sum(losses) / len(losses), 4),
            "bits_per_byte": round(found.bits_per_byte, 4),
            "seconds": round(time.monotonic() - started_s, 1),
        }  # fmt: skip
        curve.append(point)
        losses.clear()
        print(point, flush=True)
    return curve


def main() -> int:
    """Curve and baselines; 1 if the model is not better than the token unigram."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path(".k3ray/data"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--experts", type=ExpertFormat, default=ExpertFormat.FP32)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data_dir = curated(options.data)
    heldout = PackedDataset.open(data_dir, split=HELDOUT)
    cfg = PRESETS["k3-nano"].text_config
    model = K3Model(cfg, numeric=NumericMode.FAST)
    init_dense(model, 0)
    with tempfile.TemporaryDirectory(prefix="k3ray-learning-") as root:
        experts = LocalExperts(
            cfg, store=WeightStore(Path(root)), line="main", experts=options.experts
        )
        experts.load(None, step=0, seed=0)
        data = DataOrder(
            source=PackedDataset.open(data_dir, split=TRAIN), seed=0, micro_batches=1, sequences=4
        )
        parts = StepParts(
            model=model, dense=DenseOptimizer(model), experts=experts, data=data,
            optimizer=OPTIMIZER, total_steps=options.steps,
        )  # fmt: skip
        curve = train(parts, options.steps, heldout)
    unigrams = baselines(str(data_dir))
    last = curve[-1]["bits_per_byte"]
    record("learning", {
        "experts": str(options.experts), "steps": options.steps,
        "tokens": options.steps * 4 * 512, "curve": curve, "bits_per_byte": last, **unigrams,
        "zstd_19_with_training_text": round(zstd_bits_per_byte(data_dir, heldout), 4),
    })  # fmt: skip
    return 0 if last < (unigrams["token_unigram"] or 0.0) else 1


if __name__ == "__main__":
    sys.exit(main())
