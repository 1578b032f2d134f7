"""Trackers: where `gradsync train --track NAME,…` sends the records of `metrics.jsonl` too.

    name          what it leaves in the run directory
    tensorboard   tensorboard/: event files
    wandb         wandb/, and wandb.json with the run's id
    trackio       trackio/: a database
    prometheus    metrics.prom: the newest values, for node-exporter's textfile collector

Rank 0 tracks alone. A tracker's package is imported when a run asks for it. No torch here.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from gradsync.core.files import PRIVATE, one_line, read_object, replace_text
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.activity import expect_wait

log = logging.getLogger("gradsync")

_PROJECT = "gradsync"
_UPLOAD_S = "30"
"""Seconds that W&B may take to upload what is left at the end, as trackio does: others wait."""


class Tracker(Protocol):
    """One tracker of one run, made before the first step as `Kind(folder, config, done_steps)`.

    Args:
        folder: of the run.
        config: the whole configuration, nested as in `config.yaml`.
        done_steps: steps that the run has already; later ones are done, and logged, again.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the finite values of one record; a step may have several records."""

    def finish(self, *, failed: bool) -> None:
        """Write what is left; `failed`: the run ends with an error."""


class _TensorBoard:
    """Event files; of steps done again TensorBoard shows the later ones."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done_steps + 1)
        text = json.dumps(config, indent=2).replace("\n", "\n    ")
        self._writer.add_text("config", f"    {text}", done_steps + 1)  # Markdown's code block

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run has them too

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


class _WeightsAndBiases:
    """A run of W&B. Its own variables (WANDB_MODE, WANDB_PROJECT …) come first, then what stands
    here; a run that is resumed keeps its id."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        import wandb

        kept = folder / "wandb.json"
        defaults = {
            "WANDB_PROJECT": _PROJECT,
            "WANDB_NAME": folder.absolute().name,
            "WANDB_FINISH_TIMEOUT": _UPLOAD_S,
        }
        if done_steps and (run_id := read_object(kept).get("id")):
            defaults |= {"WANDB_RUN_ID": str(run_id), "WANDB_RESUME": "allow"}
        with environ.exported({name: environ.get(name, defaults[name]) for name in defaults}):
            self._run = wandb.init(dir=str(folder), config=dict(config))
        replace_text(kept, json.dumps({"id": self._run.id}) + "\n", mode=PRIVATE)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Trackio:
    """A run of trackio, in the run directory unless TRACKIO_DIR says otherwise; its words go to
    standard error, since standard output may be one JSON document."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        own = {"TRACKIO_DIR": environ.get("TRACKIO_DIR", str(folder.absolute() / "trackio"))}
        with environ.exported(own), redirect_stdout(sys.stderr):
            import trackio  # it reads the variable now

            self._run = trackio.init(
                project=_PROJECT,
                name=folder.absolute().name,
                config=dict(config),
                resume="allow" if done_steps else "never",
                embed=False,
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        import trackio

        with redirect_stdout(sys.stderr):
            trackio.finish()  # the run's own would come, and speak, once more at the process's end


class _Prometheus:
    """A text file of gauges, whole at any moment; each has its newest value."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        self._path = folder / "metrics.prom"
        name = folder.absolute().name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._labels = f'{{run="{name}",rank="0"}}'
        self._newest: dict[str, float] = {}

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._newest |= {"step": step, **values}
        lines = []
        for name, value in self._newest.items():
            gauge = f"gradsync_{re.sub('[^a-zA-Z0-9_]', '_', name)}"
            lines += [
                f"# HELP {gauge} {name} in metrics.jsonl, its newest value",
                f"# TYPE {gauge} gauge",
                f"{gauge}{self._labels} {value!r}",
            ]
        # The exporter is another user; the directory says who may come in.
        replace_text(self._path, "\n".join(lines) + "\n")

    def finish(self, *, failed: bool) -> None:
        """The file stays."""


KINDS: Mapping[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _WeightsAndBiases,
    "trackio": _Trackio,
    "prometheus": _Prometheus,
}
_PACKAGES = ("tensorboard", "wandb", "trackio")
"""Trackers that need the package of their name, which the extra of that name installs."""


def tracker_names(track: str) -> list[str]:
    """The names in a list such as `tensorboard,prometheus`, each once."""
    names = list(dict.fromkeys(filter(None, map(str.strip, track.split(",")))))
    for name in names:
        if name not in KINDS:
            raise ConfigError(
                f"track: there is no tracker {name[:80]!r}; there are {', '.join(KINDS)}, several "
                "with commas between them"
            )
    return names


def require_packages(track: str) -> None:
    """Raise ConfigError where a tracker's package is not installed."""
    for name in tracker_names(track):
        # A mere folder, such as the ./wandb that W&B makes where a script runs, has no origin.
        if name in _PACKAGES and getattr(find_spec(name), "origin", None) is None:
            raise ConfigError(
                f"track={name} needs the package {name}: pip install 'gradsync[{name}]'"
            )


class Trackers:
    """The trackers of a run that work: one that raises is warned of once, and gets nothing more."""

    def __init__(self) -> None:
        self._working: dict[str, Tracker] = {}

    @expect_wait
    def start(self, track: str, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        """Start the trackers named in `track`; one that fails is left out with a warning."""
        for name in tracker_names(track):
            with self._left_alone_if_it_fails(name):
                self._working[name] = KINDS[name](folder, config, done_steps)

    def log(self, record: Mapping[str, Any]) -> None:
        """Give them a record of `metrics.jsonl`, without what is null in it."""
        values = {name: value for name, value in record.items() if value is not None}
        step = values.pop("step")
        for name, tracker in list(self._working.items()):
            with self._left_alone_if_it_fails(name):
                tracker.log(values, step)

    @expect_wait
    def finish(self, *, failed: bool) -> None:
        """End them; a second call does nothing."""
        working, self._working = self._working, {}
        for name, tracker in working.items():
            with self._left_alone_if_it_fails(name):
                tracker.finish(failed=failed)

    @contextmanager
    def _left_alone_if_it_fails(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._working.pop(name, None)
            reason = f"{type(error).__name__}: {one_line(error)}"
            log.warning("tracker %s failed and is left alone, the run goes on: %s", name, reason)
