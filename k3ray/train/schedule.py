"""Learning rate: linear warm-up, then cosine decay to the minimum at the last step."""

from __future__ import annotations

import math

from k3ray.config.jobs import OptimizerConfig


def learning_rate(step: int, total_steps: int, config: OptimizerConfig) -> float:
    """The rate of optimizer step `step` (from 1) of `total_steps`.

    >>> config = OptimizerConfig(peak_lr=1.0, min_lr=0.1, warmup_steps=10)
    >>> learning_rate(5, 110, config), learning_rate(10, 110, config)
    (0.5, 1.0)
    >>> round(learning_rate(60, 110, config), 3), round(learning_rate(110, 110, config), 3)
    (0.55, 0.1)
    """
    if step <= config.warmup_steps:
        return config.peak_lr * step / config.warmup_steps
    span = max(1, total_steps - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.min_lr + (config.peak_lr - config.min_lr) * cosine
