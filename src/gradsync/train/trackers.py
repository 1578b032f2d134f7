"""Trackers: where `gradsync train --track NAME,…` sends the records of `metrics.jsonl` too.

    name          what it leaves in the run directory
    tensorboard   tensorboard/: event files
    wandb         wandb/, and wandb.json with the run's id

`Tracker` has the shape of Accelerate's `GeneralTracker` (made with the configuration, `log(values,
step)`, `finish`), and hears at its end whether the run failed, which W&B shows.

Rank 0 tracks alone, each tracker on a thread of its own: one that raises or blocks ends nothing and
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
"""Seconds that W&B may take to upload what is left at the end: others wait."""
_START_S = 100
"""Longest to wait for a tracker's start; W&B gives up after 90 seconds, and says why."""
_FINISH_S = 45
"""Longest to wait for all trackers at the end."""
_KEPT = 1_000
"""Records that may wait for a tracker."""


class Tracker(Protocol):
    """One tracker of one run, made before the first step as `Kind(folder, config, done_steps)`.
    All its calls come from one thread, which is its own.

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
    """A run of W&B; a run that is resumed keeps its id."""

    def __init__(self, folder: Path, config: Mapping[str, Any], done_steps: int) -> None:
        import wandb

        self._run = wandb.init(dir=str(folder), config=dict(config))
        replace_text(_wandb_id(folder), json.dumps({"id": self._run.id}) + "\n", mode=PRIVATE)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


KINDS: Mapping[str, type[Tracker]] = {"tensorboard": _TensorBoard, "wandb": _WeightsAndBiases}
"""Each needs the package of its name, which the extra of that name installs."""


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
    """Raise ConfigError where a tracker's package is not installed."""
    for name in tracker_names(track):
        # A mere folder, such as the ./wandb that W&B makes where a script runs, has no origin.
        if getattr(find_spec(name), "origin", None) is None:
            raise ConfigError(
                f"track={name} needs the package {name}: pip install 'gradsync[{name}]'"
            )


def _wandb_id(folder: Path) -> Path:
    return folder / "wandb.json"


@contextmanager
def _process_for(name: str, folder: Path, done_steps: int) -> Generator[None]:
    """Let the process be as tracker `name` wants it at its start. It is the waiting thread that
    changes it, which puts it back also where the start never ends.

    The user's own variables (WANDB_MODE, WANDB_PROJECT …) come first.
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
    """A tracker on its own thread, which gets records without anyone waiting for it. Where more
    than `_KEPT` wait, the oldest make room."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        super().__init__(name=f"tracker {name}", daemon=True)
        self.tracker, self._make = name, make
        self.started = Event()
        """Set when the tracker was made, or failed."""
        self._waiting: Queue[Callable[[Tracker], None]] = Queue(_KEPT)
        self._over = self._missed = False
        self.start()

    def run(self) -> None:
        """Give the tracker what comes until `end`; the first error is the last call."""
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
        """Let the tracker have a record."""
        self._put(lambda tracker: tracker.log(values, step))

    def end(self, *, failed: bool) -> None:
        """Let it finish after what waits; the thread ends then."""

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
    """The trackers of a run that work: of one that raises, or takes too long to start or to finish,
    one line says so, and the run goes on without it."""

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
            fed.end(failed=True)  # should it start after all
            log.warning("tracker %s did not start within %s s; going on without it", name, _START_S)

    def log(self, record: Mapping[str, Any]) -> None:
        """Give them a record of `metrics.jsonl`, without what is null in it."""
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
