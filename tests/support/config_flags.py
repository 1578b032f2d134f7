"""A TrainConfig as arguments of `gradsync train`, for runs under real launchers."""

from __future__ import annotations

from pathlib import Path

from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.config_io import write_config


def train_arguments(config: TrainConfig) -> list[str]:
    """Arguments after `gradsync` that train with exactly `config`, from a file beside its `out`."""
    out = Path(config.out)
    path = next(parent for parent in out.parents if parent.is_dir()) / f"{out.name}.yaml"
    write_config(config, path)
    ranks = config.nproc_per_node
    return ["train", str(path), *([] if ranks is None else ["--nproc-per-node", str(ranks)])]
