"""`python -m pipelines.curate --config pipelines/configs/curate_python.yaml key=value ...`

Runs on its own (a local Ray in this process) or as the driver of `ray job submit`. Exit status: 0
when the data set is there, 2 for an error, which is printed with its remedy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from k3ray.config.jobs import CurateConfig
from k3ray.config.load import load_config
from k3ray.curate.dataset import existing_dataset
from k3ray.errors import K3RayError
from k3ray.jobs.progress import Progress


def main(arguments: list[str] | None = None) -> int:
    """Parse, wire, run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.curate", description=__doc__)
    parser.add_argument("--config", help="YAML file of a CurateConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parsed = parser.parse_args(arguments)
    try:
        config = load_config(CurateConfig, parsed.config, parsed.overrides)
        manifest = existing_dataset(config)
        if manifest is None:
            manifest = _curate(config)
        else:
            _say("this data set is there already, reused")
    except K3RayError as error:
        _say(f"error[{error.code}]: {error}")
        return 2
    _summarise(config.out_dir, manifest)
    return 0


def _curate(config: CurateConfig) -> dict[str, Any]:
    with Progress(_say).stage("connect to Ray"):
        _connect(config.num_workers)

        from k3ray.jobs.curate import run_curate
    return run_curate(config, say=_say).manifest


def _connect(num_workers: int) -> None:
    """The cluster of `RAY_ADDRESS` when there is one, else a local one for this process."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # idle workers cost seconds
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # busy machines start slowly
    import ray

    if os.environ.get("RAY_ADDRESS"):
        ray.init(address="auto", namespace="k3ray", log_to_driver=False)
    else:
        ray.init(
            address="local", num_cpus=max(2, num_workers), include_dashboard=False,
            namespace="k3ray", log_to_driver=False,
        )  # fmt: skip


def _summarise(out_dir: str, manifest: dict[str, Any]) -> None:
    report = json.loads((Path(out_dir) / manifest["report"]["file"]).read_text(encoding="utf-8"))
    for row in report["funnel"]:
        if row.get("documents_dropped") or row["step"] == "listed":
            _say(
                f"  {row['step']:<10} -{row.get('documents_dropped', 0):<6} "
                f"{row['documents_left']} documents left"
            )
    for split, totals in report["splits"].items():
        _say(
            f"  {split:<10} {totals['num_documents']} documents, {totals['text_bytes']} bytes, "
            f"{totals['num_tokens']} tokens, {totals['bytes_per_token']:.3f} bytes/token, "
            f"{totals['num_sequences']} sequences of {manifest['sequence_length']}"
        )
    baselines = report["heldout_bits_per_byte"]
    shown = ", ".join(
        f"{name} {bits:.4f}" if bits is not None else f"{name} none"
        for name, bits in baselines.items()
    )
    _say(f"  held-out bits per byte: {shown}; {len(report['heldout_packages'])} held-out packages")
    seconds = ", ".join(f"{name} {spent:.1f} s" for name, spent in report["seconds"].items())
    _say(f"  {seconds}")
    _say(f"data set {manifest['digest'][:16]} in {out_dir}")


def _say(line: str) -> None:
    print(f"[curate] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
