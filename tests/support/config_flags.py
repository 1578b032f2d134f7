"""A TrainConfig as arguments of `gradsync train`, for runs under real launchers."""

from __future__ import annotations

from pathlib import Path

from gradsync.train.config import TrainConfig
from gradsync.train.config_io import write_config


def train_arguments(config: TrainConfig) -> list[str]:
    """Arguments after `gradsync` that train with exactly `config`, from a file beside its `out`."""
    path = Path(f"{config.out}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_config(config, path)
    ranks = config.nproc_per_node
    return ["train", str(path), *([] if ranks is None else ["--nproc-per-node", str(ranks)])]
