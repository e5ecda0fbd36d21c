"""`python -m pipelines.pretrain --config pipelines/configs/pretrain_nano.yaml key=value ...`

Trains one line on the live supernode (which is brought up if it is not). Exit status: 0 when the
line is trained and published, 2 for an error, which is printed with its remedy.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from k3ray.config.cluster import LocalClusterConfig
from k3ray.config.home import Home
from k3ray.config.jobs import PretrainConfig
from k3ray.config.load import load_config
from k3ray.errors import K3RayError


def main(arguments: list[str] | None = None) -> int:
    """Parse, wire, run; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.pretrain", description=__doc__)
    parser.add_argument("--config", help="YAML file of a PretrainConfig")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parsed = parser.parse_args(arguments)
    started_s = time.monotonic()
    try:
        config = load_config(PretrainConfig, parsed.config, parsed.overrides)
        _say(f"line {config.supernode.line}, {config.steps} steps of {config.supernode.preset}")

        from k3ray.actors.supernode import attach_or_up
        from k3ray.jobs.pretrain import baselines, run_pretrain

        home = Home.from_env(os.environ)
        supernode = attach_or_up(config.supernode, home, LocalClusterConfig(), say=_say)
        result = run_pretrain(config, supernode, say=_say)
        _summarise(result, baselines(config.data_dir), seconds=time.monotonic() - started_s)
    except K3RayError as error:
        _say(f"error[{error.code}]: {error}")
        return 2
    return 0


def _summarise(result: dict[str, Any], unigrams: dict[str, float | None], seconds: float) -> None:
    heldout = result["eval"]["bits_per_byte"] if result["eval"] else None
    beside = ", ".join(f"{name} {_number(bits)}" for name, bits in unigrams.items())
    _say(
        f"step {result['step']}: loss {_number(result['first_loss'])} -> "
        f"{_number(result['last_loss'])} (mean of the last ten); held-out bits per byte "
        f"{_number(heldout)}, the lower the better (without a model: {beside}); "
        f"published {result['version']} in {seconds:.0f} s"
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _say(line: str) -> None:
    print(f"[pretrain] {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
