"""The run directory: one place for everything a run leaves behind. Only rank 0 writes here, except
for `logs/`.

It is the user's alone: directories are made with mode 0700, files with 0600, and no link is
followed in writing. One that was there before keeps its mode, so a group may be let in with chmod.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from gradsync.core.files import (
    PRIVATE,
    append_private,
    open_regular,
    parse_json,
    replace_text,
)
from gradsync.errors import ConfigError, RunError
from gradsync.train.config import TrainConfig
from gradsync.train.config_io import write_config
from gradsync.world import World


def default_out(config: TrainConfig) -> str:
    """A fresh run directory: `runs/PRESET-DATE-TIME`."""
    return str(Path("runs") / f"{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}")


class RunDir:
    """Paths and small files of a run.

    Args:
        path: the directory itself; made when first written to.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._metrics: TextIO | None = None

    def begin(self, config: TrainConfig, world: World, *, threads: int, done_steps: int) -> None:
        """Write what is known at the start; drop metrics of steps that will be done again."""
        self.write_json("env.json", describe_environment(world, threads))
        metrics = self.path / "metrics.jsonl"
        with self._writing():
            (self.path / "exit.json").unlink(missing_ok=True)
            write_config(config, self.path / "config.yaml")
            kept = []
            if done_steps and metrics.exists():
                with open_regular(metrics) as file:
                    lines = file.read().decode(errors="replace").splitlines(keepends=True)
                kept = [line for line in lines if _step_of(line) <= done_steps]
            replace_text(metrics, "".join(kept), mode=PRIVATE)
            self._metrics = append_private(metrics)

    def log_metrics(self, values: dict[str, float | int | None]) -> None:
        """Append one object to `metrics.jsonl`."""
        if self._metrics is not None:
            with self._writing():
                # JSON knows no nan and no infinity.
                finite = {name: _finite(value) for name, value in values.items()}
                self._metrics.write(json.dumps(finite) + "\n")
                self._metrics.flush()

    def write_json(self, name: str, value: Any) -> None:
        """Write a small JSON file, whole or not at all."""
        with self._writing():
            self._make(self.path)
            replace_text(self.path / name, json.dumps(value, indent=2) + "\n", mode=PRIVATE)

    def open_log(self, rank: int) -> TextIO:
        """The file of one rank, to append to.

        Raises:
            OSError: as the file system says.
        """
        folder = self.path / "logs"
        self._make(self.path)
        self._make(folder)
        return append_private(folder / f"rank_{rank:05d}.log")

    def _make(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)

    def close(self) -> None:
        """Close the metrics file."""
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            with suppress(OSError):  # a full disk was reported when it was met
                metrics.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error

    def refuse_overwrite(self) -> None:
        """Raise ConfigError when the directory holds checkpoints of another run."""
        if self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*")):
            raise ConfigError(
                f"{self.path} already holds a run; continue it with --resume auto, or choose "
                "another --out"
            )


def describe_environment(world: World, threads: int) -> dict[str, Any]:
    """Machine and software of the run; for `env.json`."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "gradsync": version("gradsync"),
        "argv": sys.argv,
        "launcher": world.launcher,
        "world_size": world.world_size,
        "num_nodes": world.num_nodes,
        "device": world.device,
        "threads": threads,
        "cores": os.cpu_count(),
    }


def _finite(value: float | int | None) -> float | int | None:
    return value if value is not None and math.isfinite(value) else None


def _step_of(line: str) -> int:
    try:
        return int(parse_json(line.encode())["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return sys.maxsize  # a torn last line of a killed run
