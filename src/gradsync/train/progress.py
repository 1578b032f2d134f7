"""Progress for people: a live line on a terminal, one plain line per interval elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

log = logging.getLogger("gradsync")

_WIDTH_FOR_BAR = 88


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """The figures of one logged interval; losses and norms are global values."""

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean loss of the interval's last step, nats per token."""
    lr: float
    """Learning rate of that step."""
    grad_norm: float | None
    """Norm of its mean gradient before clipping."""
    tokens_per_s: float
    """Tokens per second, all ranks together."""
    step_s: float
    """Mean time of a step, seconds."""
    data_s: float
    """Time in it that rank 0 waited for data, seconds."""
    comm_s: float
    """Time in it of rank 0's communication that nothing hid, seconds."""


class Progress:
    """Prints on rank 0, says nothing elsewhere.

    Args:
        steps: total optimizer steps.
        world_size: ranks, for the per-device rate.
        enabled: rank 0.
        stream: where to; a terminal gets a live line (rich honours NO_COLOR).
        live: False prints plain lines on a terminal, too.

    A reader that goes away (`| head`, a closed terminal) ends the printing, not the training.
    """

    def __init__(
        self,
        steps: int,
        world_size: int,
        *,
        enabled: bool,
        stream: TextIO | None = None,
        live: bool = True,
    ) -> None:
        self._steps = steps
        self._world_size = world_size
        self._enabled = enabled
        self._stream = stream or sys.stdout
        self._wants_live = live
        self._live: Any = None
        self._task: Any = None
        self._since: tuple[int, float] | None = None

    def start(self, done_steps: int) -> None:
        """Begin at `done_steps`."""
        self._since = (done_steps, time.monotonic())
        if self._enabled and self._wants_live and self._stream.isatty():
            live = _live_line(self._stream)
            if live.console.is_dumb_terminal:
                return
            self._live = live
            self._task = live.add_task("train", total=self._steps, completed=done_steps, say="")
            with self._printing():
                live.start()

    def say(self, text: str) -> None:
        """Print a line, above the live one if there is one."""
        if not self._enabled:
            return
        with self._printing():
            if self._live is not None:
                self._live.console.print(
                    text, markup=False, emoji=False, highlight=False, soft_wrap=True
                )
            else:
                print(text, file=self._stream, flush=True)

    def tick(self, tick: Tick) -> None:
        """Show one interval."""
        if not self._enabled:
            return
        rate = tick.tokens_per_s / self._world_size
        share = 100 * tick.comm_s / tick.step_s if tick.step_s else 0.0
        speed = f"{rate:,.0f} tok/s/device  comm {share:.0f}%"
        if self._live is not None:  # has to fit 80 columns together with step, bar and eta
            line = f"loss {tick.loss:.4f}  {speed}"
            with self._printing():
                self._live.update(self._task, completed=tick.step, say=line)
            return
        norm = "" if tick.grad_norm is None else f"norm {tick.grad_norm:.2f}  "
        self.say(
            f"step {tick.step:>{len(str(self._steps))}}/{self._steps}  loss {tick.loss:.4f}  {norm}"
            f"lr {tick.lr:.2e}  {speed}  eta {_clock(self._seconds_left(tick.step))}"
        )

    def stop(self) -> None:
        """End the live line; safe to call twice."""
        live, self._live = self._live, None
        if live is not None:
            with self._printing():
                live.stop()

    @contextmanager
    def _printing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._enabled = False
            self._live = None
            log.warning("output ended (%s); the run goes on", error.strerror)

    def _seconds_left(self, step: int) -> float:
        if self._since is None or step <= self._since[0]:
            return 0.0
        first, started = self._since
        return (time.monotonic() - started) / (step - first) * (self._steps - step)


def _live_line(stream: TextIO) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Live

    console = Console(file=stream)
    # The figures matter more than the bar where there is no room for both.
    bar = [BarColumn(bar_width=10)] if console.width >= _WIDTH_FOR_BAR else []
    return Live(
        TextColumn("step"),
        MofNCompleteColumn(),
        *bar,
        TextColumn("{task.fields[say]}", markup=False),
        TextColumn("eta"),
        TimeRemainingColumn(),
        console=console,
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
