"""A TrainConfig as command-line flags, for runs under real launchers."""

from __future__ import annotations

from dataclasses import asdict

from gradsync.train.config import TrainConfig
from gradsync.train.config_io import to_flags


def train_arguments(config: TrainConfig) -> list[str]:
    """Arguments after `gradsync` that train with exactly `config`."""
    values = asdict(config)
    preset = values.pop("preset")
    return ["train", preset, *to_flags(values)]
