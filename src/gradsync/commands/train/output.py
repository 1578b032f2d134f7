"""Output of a run: lines on the terminal, and the run directory.

Only rank 0 writes to the directory, except for `logs/`. It is private to the user: directories are
created with mode 0700, files with 0600, and writes follow no link. An existing directory keeps its
mode, so chmod can admit a group.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from gradsync.commands.plan.description import Device
from gradsync.commands.train.config import TrainConfig
from gradsync.commands.train.config_io import write_config
from gradsync.commands.train.trackers import Trackers
from gradsync.core.files import (
    PRIVATE,
    append_private,
    lock,
    open_regular,
    parse_json,
    printable,
    read_object,
    replace_text,
)
from gradsync.errors import ConfigError, RunError, UsageError
from gradsync.runtime.activity import Activity
from gradsync.runtime.waiting import waiting_ranks
from gradsync.world import World

log = logging.getLogger("gradsync")

_LOOKS = 30
"""Looks at the ranks over which rates and shares are averaged."""

_UNEQUAL = re.compile(r'"check/\w+": 0\b')
"""Marks a record of different bits, which is kept even if its step is repeated."""
_SHOWN = (
    *("step", "train/loss", "optim/grad_norm", "optim/lr"),
    *("perf/tokens_per_s", "perf/step_s", "comm/exposed_s"),
)


Metrics = Mapping[str, Any]
"""One object of `metrics.jsonl`; names contain units; losses and norms are global values."""


class Progress:
    """A line per logged interval on rank 0, and what else the run says; nothing unless `enabled`.

    If the reader goes away (`| head`, a closed terminal), printing ends and training goes on.
    """

    def __init__(
        self, steps: int, world_size: int, *, enabled: bool, stream: TextIO | None = None
    ) -> None:
        self._steps, self._world_size, self._enabled = steps, world_size, enabled
        self._stream = stream or sys.stdout
        self._since = (0, time.monotonic())

    def start(self, done_steps: int) -> None:
        """Start at `done_steps`."""
        self._since = (done_steps, time.monotonic())

    def go_on(self, done_steps: int, world_size: int, *, enabled: bool) -> None:
        """Continue after a loss, with fewer ranks, and perhaps as another rank."""
        self._world_size, self._enabled = world_size, enabled
        self.start(done_steps)

    def say(self, text: str) -> None:
        """Print a line at once."""
        if not self._enabled:
            return
        try:
            print(printable(text), file=self._stream, flush=True)
        except OSError as error:
            self._enabled = False
            log.warning("output ended (%s); the run goes on", error.strerror)

    def show(self, metrics: Metrics) -> None:
        """Print the figures of one logged interval."""
        step, loss, norm, lr, tokens_per_s, step_s, comm_s = (metrics[name] for name in _SHOWN)
        share = 100 * comm_s / step_s if step_s else 0.0
        norm_text = "" if norm is None else f"norm {norm:.2f}  "
        first, started = self._since
        each_s = (time.monotonic() - started) / max(step - first, 1)
        left = timedelta(seconds=int(each_s * (self._steps - step)))
        self.say(
            f"step {step:>{len(str(self._steps))}}/{self._steps}  loss {loss:.4f}  {norm_text}"
            f"lr {lr:.2e}  {tokens_per_s / self._world_size:,.0f} tok/s/device  "
            f"exposed {share:.0f}%  eta {left}"
        )


def default_out(config: TrainConfig) -> str:
    """A new run directory: `runs/PRESET-DATE-TIME`."""
    return str(Path("runs") / f"{config.preset}-{time.strftime('%Y%m%d-%H%M%S')}")


class RunDir:
    """Paths and small files of a run; the first write creates the directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self._starts: TextIO | None = None
        self._metrics: TextIO | None = None
        self._trackers = Trackers()
        self._ranks: RankTable | None = None

    def hold(self, *, begin: bool = False) -> None:
        """Lock out other runs; without `begin`, only if a run has begun here before. RunError if
        another run writes here."""
        path = self.path / "starts.jsonl"
        if self._starts is None and (begin or path.exists()):
            with self._writing():
                _make(self.path)
                self._starts = append_private(path)
            if not lock(self._starts):
                raise RunError(
                    f"another run writes to --out {self.path}: wait for its end, or choose another"
                )

    def begin(
        self,
        config: TrainConfig,
        world: World,
        device: Device,
        *,
        threads: int,
        done_steps: int,
        ranks: Callable[[], Mapping[int, Activity]] | None = None,
    ) -> None:
        """Write what is known at the start (`starts.jsonl`: also how the previous run ended, and
        the step it reached); drop metrics of steps that will be repeated; start the trackers and
        the table of `ranks`."""
        self.hold(begin=True)
        self.write_json("env.json", describe_environment(world, device, threads))
        metrics = self.path / "metrics.jsonl"
        with self._writing():
            before = read_object(self.path / "exit.json")
            for name in ("exit.json", "ranks.json"):
                (self.path / name).unlink(missing_ok=True)
            write_config(config, self.path / "config.yaml")
            text = ""
            if metrics.exists():
                with open_regular(metrics) as file:
                    text = file.read().decode(errors="replace")
            records = [(line, _step_of(line)) for line in text.splitlines(keepends=True)]
            trained = [n for line, n in records if '"check/' not in line and n < sys.maxsize]
            start = {
                "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
                "step": done_steps,
                "world_size": world.world_size,
                "reached": max(trained, default=None),
                "before": before or None,
            }
            assert self._starts is not None, "held"
            self._starts.write(json.dumps(start) + "\n")
            self._starts.flush()
            kept = [
                line
                for line, step in records
                if done_steps and (step <= done_steps or _UNEQUAL.search(line))
            ]
            replace_text(metrics, "".join(kept), mode=PRIVATE)
            self._metrics = append_private(metrics)
        self._trackers.start(config.track, self.path, asdict(config), done_steps)
        if ranks is not None:
            path, size = self.path / "ranks.json", world.world_size
            self._ranks = RankTable(path, ranks, size, done_steps)

    def log_metrics(self, values: Metrics) -> None:
        """Append one object to `metrics.jsonl`, and pass it to the trackers."""
        if self._metrics is not None:
            finite = {name: finite_or_none(value) for name, value in values.items()}
            with self._writing():
                self._metrics.write(json.dumps(finite) + "\n")
                self._metrics.flush()
            self._trackers.log(finite)

    def log_incident(self, values: Metrics) -> None:
        """Append to `incidents.jsonl` what the run has gone on after (the step, `seconds` from the
        fault to the next committed one), or ended with; kind, rank, host, what was `said`."""
        with self._writing(), append_private(self.path / "incidents.jsonl") as file:
            file.write(json.dumps(values) + "\n")

    def write_json(self, name: str, value: Any) -> None:
        """Write a small JSON file, whole or not at all."""
        with self._writing():
            _make(self.path)
            replace_text(self.path / name, json.dumps(value, indent=2) + "\n", mode=PRIVATE)

    @contextmanager
    def rank_log(self, world: World) -> Generator[None]:
        """This rank's log file: its start, log lines, and how it ended; with a traceback, unless
        the request was refused."""
        folder = self.path / "logs"
        try:
            _make(self.path)
            _make(folder)
            rank = world.recovery.name if world.waits_to_join else world.rank
            file = append_private(folder / f"rank_{rank:05d}.log")
        except OSError as error:
            raise ConfigError(f"cannot write to --out {self.path}: {error.strerror}") from error
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        handler.handleError = lambda record: None  # a full disk is reported elsewhere
        own = logging.Logger("gradsync.rank")  # not in the logger tree: the terminal gets nothing
        own.addHandler(handler)
        log.addHandler(handler)
        try:
            own.info("started: %s", world.describe())
            yield
            own.info("ended")
        except BaseException as error:
            shown = None if isinstance(error, UsageError) else error
            own.error("ended by %s", type(error).__name__, exc_info=shown)
            raise
        finally:
            log.removeHandler(handler)
            with suppress(OSError):
                file.close()

    def close(self, *, failed: bool = False) -> None:
        """Close the files, end the trackers; `failed`: the run ends with an error."""
        for file in filter(None, (self._metrics, self._starts)):
            with suppress(OSError):  # a full disk has been reported already
                file.close()
        self._metrics = self._starts = None
        self.end_table()
        self._trackers.finish(failed=failed)

    def end_table(self) -> None:
        """Stop the table of ranks: they leave one by one; safe to call twice."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(f"cannot write to {self.path}: {error.strerror}") from error

    def refuse_overwrite(self) -> None:
        """Raise ConfigError if the directory holds checkpoints of another run."""
        if self.checkpoints.is_dir() and any(self.checkpoints.glob("step-*")):
            raise ConfigError(
                f"{self.path} already holds a run; continue it with --resume auto, or choose "
                "another --out"
            )


class RankTable:
    """Writes the file from a thread, at most once a second; the last version stays after the run.
    `read` returns the ranks' activities, an exception ends the thread; `done_steps` were done
    before the ranks report more."""

    def __init__(
        self,
        path: Path,
        read: Callable[[], Mapping[int, Activity]],
        world_size: int,
        done_steps: int,
    ) -> None:
        self._path, self._read, self._done_steps = path, read, done_steps
        self.every_s = max(1.0, world_size / 64)
        self._over = threading.Event()
        self._beats: dict[int, tuple[int, float]] = {}  # A rank's heartbeat number, and since when
        self._looks: deque[tuple[float, dict[int, int], list[int]]] = deque(maxlen=_LOOKS)
        """The time, the ranks' steps, and the ranks that waited."""
        self._thread = threading.Thread(target=self._run, name="gradsync-ranks", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        over = False
        try:
            while not over:
                rows = self.rows(self._read(), time.monotonic())
                document = {"time": time.time(), "every_s": self.every_s, "ranks": rows}
                with suppress(OSError):  # a full disk may have room later
                    text = json.dumps(document) + "\n"
                    replace_text(self._path, text, mode=PRIVATE, durable=False)
                over = self._over.wait(self.every_s)
        except Exception as error:  # the store is gone: the watch reports it
            log.debug("ranks.json is not kept any more: %s", error)

    def rows(self, found: Mapping[int, Activity], now: float) -> list[dict[str, Any]]:
        """A row per rank: its optimizer step and rate, its phase and location, the share of recent
        looks in which it waited, and the seconds for which others have waited for it."""
        for rank, each in found.items():
            if self._beats.get(rank, (-2, 0.0))[0] != each.beat:
                self._beats[rank] = (each.beat, now)
        silent = [r for r, (_, since) in self._beats.items() if now - since > 4 * self.every_s]
        waiting = waiting_ranks(found, silent)
        longest_s = max((found[rank].since_s for rank in waiting), default=0.0)
        steps = {rank: max(each.step, self._done_steps) for rank, each in found.items()}
        self._looks.append((now, steps, waiting))
        then, before, _ = self._looks[0]
        passed = now - then

        def phase(rank: int, each: Activity) -> str:
            if rank in silent:
                return "silent"
            return "waits" if rank in waiting else "saves" if each.excused else "computes"

        return [
            {
                "rank": rank,
                "step": steps[rank],
                "steps_per_s": (steps[rank] - before[rank]) / passed if passed else None,
                "phase": phase(rank, each),
                "where": each.where,
                "waited": sum(rank in who for _, _, who in self._looks) / len(self._looks),
                "lag_s": 0.0 if rank in waiting or each.excused else longest_s,
            }
            for rank, each in found.items()
        ]

    def close(self) -> None:
        """Stop writing; does not wait for a disk that does not answer."""
        self._over.set()
        self._thread.join(timeout=2.0)


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def describe_environment(world: World, device: Device, threads: int) -> dict[str, Any]:
    """Machine and software of the run, for `env.json`."""
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
        "device": world.device_name,
        "device_name": device.name,
        "peak_tflops": round(device.peak_flops / 1e12, 3),
        "peak_source": device.source,
        "threads": threads,
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 1),
    }


def finite_or_none(value: float | int | None) -> float | int | None:
    """None for nan and infinity, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def _step_of(line: str) -> int:
    try:
        return int(parse_json(line.encode())["step"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return sys.maxsize  # a killed run's last line may be torn
