"""Trackers: `gradsync train --track NAME,…` also sends the records of `metrics.jsonl` there.

    name          what it leaves in the run directory
    tensorboard   tensorboard/: event files
    wandb         wandb/, and wandb.json with the run's id

`Tracker` follows Accelerate's `GeneralTracker` (made with the configuration, `log(values, step)`,
`finish`); `finish` also receives whether the run failed, which W&B shows.

Only rank 0 tracks, with a thread per tracker: a tracker that raises or blocks ends nothing and
delays no rank. Its package is imported when a run asks for it. No torch here.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Any, Protocol

from gradsync.core.files import PRIVATE, one_line, read_object, replace_text
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.activity import expect_wait

log = logging.getLogger("gradsync")

_PROJECT = "gradsync"
_UPLOAD_S = "30"
"""Seconds that W&B may take for its last upload; other ranks wait for it."""
_START_S = 100
"""Longest wait for a tracker to start, seconds; W&B gives up after 90, and says why."""
_FINISH_S = 45
"""Longest wait for all trackers at the end, seconds."""
_KEPT = 1_000
"""Records that may queue for a tracker."""


class Tracker(Protocol):
    """One tracker of one run, made before the first step as `Kind(folder, config, done_steps)`. One
    thread, which serves no other tracker, makes all calls.

    Args:
        folder: of the run.
        config: the whole configuration, nested as in `config.yaml`.
        done_steps: steps the run has done already; later steps are done, and logged, again.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None: ...

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take the finite values of one record; a step may have several records."""

    def finish(self, *, failed: bool) -> None:
        """Write what is left; `failed`: the run ends with an error."""


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
    """A run of W&B; a resumed run keeps its id."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        import wandb

        self._run = wandb.init(dir=str(folder), config=dict(config))
        replace_text(_wandb_id(folder), json.dumps({"id": self._run.id}) + "\n", mode=PRIVATE)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


KINDS: Mapping[str, type[Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
"""Each needs the package of the same name, which the extra of that name installs."""


def tracker_names(track: str) -> list[str]:
    """The names in a list such as `tensorboard,wandb`, each once."""
    names = list(dict.fromkeys(filter(None, map(str.strip, track.split(",")))))
    for name in names:
        if name not in KINDS:
            raise ConfigError(
                f"track: there is no tracker {name[:80]!r}; there are {', '.join(KINDS)}, several "
                "with commas between them"
            )
    return names


def require_packages(track: str) -> None:
    """Raise ConfigError if a tracker's package is not installed."""
    for name in tracker_names(track):
        # A plain folder, such as the ./wandb that W&B creates next to a script, has no origin.
        if getattr(find_spec(name), "origin", None) is None:
            raise ConfigError(
                f"track={name} needs the package {name}: pip install 'gradsync[{name}]'"
            )


def _wandb_id(folder: Path) -> Path:
    return folder / "wandb.json"


@contextmanager
def _process_for(name: str, folder: Path, done_steps: int) -> Generator[None]:
    """Set the process's variables as tracker `name` needs them at its start. The waiting thread
    sets them, and restores them even if the start never ends.

    Variables that the user set (WANDB_MODE, WANDB_PROJECT …) take precedence.
    """
    defaults = {}
    if name == "wandb":
        defaults = {
            "WANDB_PROJECT": _PROJECT,
            "WANDB_NAME": folder.absolute().name,
            "WANDB_FINISH_TIMEOUT": _UPLOAD_S,
        }
        if done_steps and (run_id := read_object(_wandb_id(folder)).get("id")):
            defaults |= {"WANDB_RUN_ID": str(run_id), "WANDB_RESUME": "allow"}
    variables = {name: environ.get(name, value) for name, value in defaults.items()}
    with environ.exported(variables):
        yield


class _Fed(Thread):
    """A tracker on a separate thread, so that nothing waits when it gets a record. If more than
    `_KEPT` records are queued, the oldest are dropped."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.tracker, self._make = name, make
        self.started = Event()
        """Set when the tracker is made, or has failed."""
        self._waiting: Queue[Callable[[Tracker], None]] = Queue(_KEPT)
        self._over = self._missed = False
        self.start()

    def run(self) -> None:
        """Pass queued calls to the tracker until `end`; the first error is the last call."""
        try:
            tracker = self._make()
            self.started.set()
            while not self._over:
                self._waiting.get()(tracker)
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"
            log.warning(
                "tracker %s failed and is left alone, the run goes on: %s", self.tracker, reason
            )
        finally:
            self.started.set()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Queue a record for the tracker."""
        self._put(lambda tracker: tracker.log(values, step))

    def end(self, *, failed: bool) -> None:
        """Finish after the queued records; then the thread ends."""

        def finish(tracker: Tracker) -> None:
            self._over = True
            tracker.finish(failed=failed)

        self._put(finish)

    def _put(self, call: Callable[[Tracker], None]) -> None:
        while self.is_alive():
            with suppress(Full):
                self._waiting.put_nowait(call)
                return
            with suppress(Empty):
                self._waiting.get_nowait()
            if not self._missed:
                self._missed = True
                log.warning(
                    "tracker %s is %d records behind: the oldest that it has not got are dropped "
                    "from now on; metrics.jsonl has them all",
                    *(self.tracker, _KEPT),
                )


class Trackers:
    """The working trackers of a run. If one raises, or takes too long to start or to finish, one
    line reports it, and the run goes on without it."""

    def __init__(self) -> None:
        self._fed: list[_Fed] = []

    @expect_wait
    def start(self, track: str, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        """Start the trackers named in `track`, one after another."""
        for name in tracker_names(track):
            with _process_for(name, folder, done_steps):
                fed = _Fed(name, partial(KINDS[name], folder, config, done_steps))
                if fed.started.wait(_START_S):
                    self._fed.append(fed)
                    continue
            fed.end(failed=True)  # in case it starts after all
            log.warning("tracker %s did not start within %s s; going on without it", name, _START_S)

    def log(self, record: Mapping[str, Any]) -> None:
        """Pass on a record of `metrics.jsonl`, without its nulls."""
        values = {name: value for name, value in record.items() if value is not None}
        step = values.pop("step")
        for fed in self._fed:
            fed.log(values, step)

    @expect_wait
    def finish(self, *, failed: bool) -> None:
        """End them; a second call does nothing."""
        ending, self._fed = self._fed, []
        deadline = time.monotonic() + _FINISH_S
        for fed in ending:
            fed.end(failed=failed)
        for fed in ending:
            fed.join(max(0.0, deadline - time.monotonic()))
            if fed.is_alive():
                log.warning(
                    "tracker %s did not finish within %s s and is left alone; metrics.jsonl has "
                    "all records",
                    *(fed.tracker, _FINISH_S),
                )
