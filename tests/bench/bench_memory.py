"""Memory: what a sequence holds against the plan, a long prefill, and checkpoints beyond a bound.

Each arm runs in a process of its own and prints its peak resident memory over that of a process
that has only imported the code. `make bench-memory`; about four minutes.

* state: bytes of the tensors that a token and a request hold = what `k3ray plan` says.
* prefill: 32,768 tokens of `k3-nano` through the serving path, last logits only.
* checkpoint: `k3-mini` written and read (about 400 MB in float32): at most `BOUND_MIB` are held.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_rows import record

BOUND_MIB = 96
PREFILL_TOKENS = 32_768
MIB = 1 << 20


def peak_mib() -> float:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB


def idle() -> str:
    """Imports what the others import, and nothing else."""
    import torch

    import k3ray.model.checkpoint_codec
    import k3ray.model.scorer
    import k3ray.weights.checkpoint_writer

    torch.set_num_threads(1)
    torch.randn(256, 256) @ torch.randn(256, 256)  # the math library's own buffers
    return k3ray.model.scorer.__name__


def prefill() -> str:
    """One long prompt in chunks, as an attention stack does it."""
    import torch

    from k3ray.config.presets import PRESETS
    from k3ray.model.init import init_dense
    from k3ray.model.k3 import K3Model
    from k3ray.model.local_executor import LocalExecutor
    from k3ray.model.serve_state import SeqSpan, ServeState
    from tests.support.local_stack import local_bank

    torch.set_num_threads(1)
    cfg = PRESETS["k3-nano"].text_config
    model = K3Model(cfg)
    init_dense(model, 0)
    model.requires_grad_(requires_grad=False)
    executor = LocalExecutor(local_bank(cfg, {"v": 0}), version="v")
    pages = tuple(range(PREFILL_TOKENS // 64))
    state = ServeState(cfg, num_slots=1, num_pages=len(pages))
    tokens = torch.randint(0, cfg.vocab_size, (PREFILL_TOKENS,))
    before_mib, started_s = peak_mib(), time.perf_counter()
    for start in range(0, PREFILL_TOKENS, 256):
        span = SeqSpan(slot=0, pages=pages, start=start, length=256)
        model.forward_serve(tokens[start : start + 256], [span], state, executor)
    rate = PREFILL_TOKENS / (time.perf_counter() - started_s)
    return f"{before_mib:.1f} {rate:.0f}"


def write(folder: Path) -> str:
    """A random float32 checkpoint of k3-mini."""
    import torch

    from k3ray.config.numeric import ExpertFormat
    from k3ray.config.presets import PRESETS
    from k3ray.model.checkpoint_codec import random_source
    from k3ray.weights.checkpoint_writer import write_checkpoint

    torch.set_num_threads(1)
    model = PRESETS["k3-mini"]
    write_checkpoint(folder, model, ExpertFormat.FP32, random_source(model, 0))
    return str(sum(file.stat().st_size for file in folder.iterdir()))


def read(folder: Path) -> str:
    """Every tensor checked, one after the other."""
    import torch

    from k3ray.model.checkpoint_codec import check_numbers
    from k3ray.weights.checkpoint import Checkpoint

    torch.set_num_threads(1)
    return str(sum(1 for _ in check_numbers(Checkpoint.open(folder))))


def in_process(arm: str, folder: Path) -> tuple[float, str]:
    """(peak MiB, what the arm says) of a process of its own."""
    command = [sys.executable, __file__, "--arm", arm, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=3000)
    peak, _, said = done.stdout.strip().splitlines()[-1].partition(" ")
    return float(peak), said


def state_row() -> dict[str, object]:
    """Bytes that a token and a request hold in the engine's tensors, and by the plan."""
    from k3ray.config.presets import PRESETS
    from k3ray.model.serve_state import ServeState
    from k3ray.placement.memory_plan import cache_bytes_per_token, request_state

    cfg = PRESETS["k3-nano"].text_config

    def allocated(num_slots: int, num_pages: int) -> int:
        return ServeState(cfg, num_slots=num_slots, num_pages=num_pages).size_bytes

    per_token = (allocated(1, 2) - allocated(1, 1)) // 64
    per_request = allocated(2, 1) - allocated(1, 1)
    return {
        "cache_bytes_per_token": per_token, "planned_per_token": cache_bytes_per_token(cfg, 4),
        "state_bytes_per_request": per_request, "planned_per_request": request_state(cfg, 4).total,
    }  # fmt: skip


def main() -> int:
    """Run the arms; 1 if memory is not what was planned or bounded."""
    with tempfile.TemporaryDirectory(prefix="k3ray-memory-") as root:
        folder = Path(root) / "mini"
        base, _ = in_process("idle", folder)
        peak, said = in_process("prefill", folder)
        before, rate = (float(part) for part in said.split())
        written, size = in_process("write", folder)
        readers, _ = in_process("read", folder)
    size_mib = int(size) / MIB
    row = {
        **state_row(), "idle_mib": round(base, 1), "prefill_tokens": PREFILL_TOKENS,
        "prefill_peak_over_start_mib": round(peak - before, 1), "prefill_tokens_per_s": rate,
        "checkpoint_mib": round(size_mib, 1), "write_peak_over_idle_mib": round(written - base, 1),
        "read_peak_over_idle_mib": round(readers - base, 1), "bound_mib": BOUND_MIB,
    }  # fmt: skip
    record("memory", row)
    as_planned = (
        row["cache_bytes_per_token"] == row["planned_per_token"]
        and row["state_bytes_per_request"] == row["planned_per_request"]
    )
    bounded = size_mib > BOUND_MIB > max(written, readers) - base
    return 0 if as_planned and bounded else 1


ARMS: dict[str, Callable[[Path], str]] = {
    "idle": lambda _: idle(), "prefill": lambda _: prefill(), "write": write, "read": read,
}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--arm", choices=ARMS)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.arm is None:
        sys.exit(main())
    result = ARMS[options.arm](options.folder)
    print(f"{peak_mib():.1f} {result}")
