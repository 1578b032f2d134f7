"""Trackers: `gradsync train --track NAME,…` also sends the records of `metrics.jsonl` there.

    name          what it leaves in the run directory
    tensorboard   tensorboard/: event files
    wandb         wandb/, and wandb.json with the run's id

Only rank 0 tracks. Both packages queue what they get and write it from a thread of their own, so no
step waits for a disk or a network. A tracker that raises is left alone, and the run goes on. Its
package is imported when a run asks for it. No torch here.

A tracker is made before the first step, with the run's folder, its configuration as in
`config.yaml` and the number of steps that are done. `log` takes the finite values of one record;
later steps are done, and logged, again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gradsync.core.files import PRIVATE, check_name, one_line, read_object, replace_text
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.activity import expect_wait

log = logging.getLogger("gradsync")


class _TensorBoard:
    """Event files; for a repeated step TensorBoard shows the later values."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done_steps + 1)
        text = json.dumps(config, indent=2).replace("\n", "\n    ")
        self._writer.add_text("config", f"    {text}", done_steps + 1)  # a code block in Markdown

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # so that a killed run keeps them

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of W&B; a resumed run keeps its id. Variables that the user set (WANDB_MODE,
    WANDB_PROJECT …) take precedence."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        import wandb

        defaults = {
            "WANDB_PROJECT": "gradsync",
            "WANDB_NAME": folder.absolute().name,
            "WANDB_FINISH_TIMEOUT": "30",  # seconds; other ranks wait for the last upload
        }
        if done_steps and (run_id := read_object(folder / "wandb.json").get("id")):
            defaults |= {"WANDB_RUN_ID": str(run_id), "WANDB_RESUME": "allow"}
        with environ.exported({name: environ.get(name, v) for name, v in defaults.items()}):
            self._run = wandb.init(dir=str(folder), config=dict(config))
        replace_text(folder / "wandb.json", json.dumps({"id": self._run.id}) + "\n", mode=PRIVATE)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


KINDS: Mapping[str, Any] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
"""Each needs the package of the same name, which the extra of that name installs."""


def tracker_names(track: str) -> list[str]:
    """The names in a list such as `tensorboard,wandb`, each once."""
    names = list(dict.fromkeys(filter(None, map(str.strip, track.split(",")))))
    for name in names:
        check_name("tracker", name, KINDS)
    return names


def require_packages(track: str) -> None:
    """Raise ConfigError if a tracker's package is not installed."""
    for name in tracker_names(track):
        # A plain folder, such as the ./wandb that W&B creates next to a script, has no origin.
        if getattr(find_spec(name), "origin", None) is None:
            raise ConfigError(
                f"track={name} needs the package {name}: pip install 'gradsync[{name}]'"
            )


class Trackers:
    """The working trackers of a run. If one raises, one line reports it, and the run goes on
    without it."""

    def __init__(self) -> None:
        self._working: dict[str, Any] = {}

    @expect_wait
    def start(self, track: str, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        """Start the trackers named in `track`, one after another."""
        for name in tracker_names(track):
            try:
                self._working[name] = KINDS[name](folder, config, done_steps)
            except Exception as error:
                _warn(name, error)

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass on a record of `metrics.jsonl`, without its nulls."""
        values = {name: value for name, value in record.items() if value is not None}
        step = values.pop("step")
        self._each(lambda tracker: tracker.log(values, step))

    @expect_wait
    def finish(self, *, failed: bool) -> None:
        """End them; a second call does nothing."""
        self._each(lambda tracker: tracker.finish(failed=failed))
        self._working = {}

    def _each(self, call: Callable[[Any], None]) -> None:
        for name, tracker in list(self._working.items()):
            try:
                call(tracker)
            except Exception as error:
                del self._working[name]
                _warn(name, error)


def _warn(name: str, error: Exception) -> None:
    reason = f"{type(error).__name__}: {one_line(error)}"
    log.warning("tracker %s failed and is left alone, the run goes on: %s", name, reason)
