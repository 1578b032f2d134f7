"""Starting points: a model preset with the batch and the learning rate that suit it."""

from __future__ import annotations

from gradsync.models.config import preset
from gradsync.train.config import CheckpointConfig, EvalConfig, OptimConfig, TrainConfig


def recipe(name: str) -> TrainConfig:
    """The configuration that `gradsync train NAME` starts from.

    Raises:
        ConfigError: no such preset, naming the nearest.
    """
    model = preset(name)
    if name == "tiny":
        return TrainConfig(
            preset=name,
            model=model,
            steps=300,
            tokens_per_update=4_096,
            micro_batch_size=2,  # 8 leaves of 512 tokens: up to 8 ranks
            optim=OptimConfig(lr=3e-3, warmup_steps=20),
            eval=EvalConfig(every=100),
            checkpoint=CheckpointConfig(every=100),
        )
    if name == "mini":
        return TrainConfig(
            preset=name,
            model=model,
            tokens_per_update=32_768,
            micro_batch_size=2,
            optim=OptimConfig(lr=1e-3),
        )
    # Peak learning rates fall with the width, as in GPT-3 (arXiv 2005.14165, table 2.1).
    rates = {
        "small": 6e-4,
        "medium": 3e-4,
        "large": 2.5e-4,
        "xl": 2e-4,
        "1.3b": 2e-4,
        "2.7b": 1.6e-4,
    }
    return TrainConfig(preset=name, model=model, optim=OptimConfig(lr=rates[name]))
