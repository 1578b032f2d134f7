"""Learning rate as a pure function of the optimizer step: no state to save or to step twice."""

from __future__ import annotations

import math

from gradsync.train.config import OptimConfig


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`.

        lr │  /‾‾‾\\              │  /‾‾‾‾‾‾‾‾\\
           │ /      ‾‾\\__        │ /          \\
           └──────────────        └──────────────
             cosine                 wsd

    Steps are optimizer steps, whatever the world size or the accumulation. The first step has
    peak / warmup_steps, step `warmup_steps` the peak, the last one peak x min_lr_ratio.

    Sources: cosine arXiv 1608.03983, wsd arXiv 2404.06395.
    """
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    last = total_steps - 1
    if config.schedule == "cosine":
        progress = (step - warmup) / max(last - warmup, 1)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    decay = max(min(round(config.decay_fraction * total_steps), last - warmup), 1)
    progress = (step - (last - decay)) / decay
    return config.lr + (floor - config.lr) * min(max(progress, 0.0), 1.0)
