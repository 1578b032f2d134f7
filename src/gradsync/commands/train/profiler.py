"""Traces of two training steps, one file a rank, for Perfetto and for `gradsync report`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Self

import torch

from gradsync.core.files import one_line
from gradsync.core.torch_private import PROFILE_ALL_THREADS
from gradsync.world import World

log = logging.getLogger("gradsync")

STEPS = 2
"""Two, because sums of the first may still be in flight in the second."""
FOLDER = "profile_trace"


class StepProfiler:
    """Runs torch's profiler over a step (counted from 1; 0: none) and the next one, on all threads
    of this rank. A context manager, so that a step that raises is traced too. Files are named as
    torchtitan's: `profile_trace/iteration_N/rankR_trace.json` in the run's folder."""

    def __init__(self, step: int, folder: Path, world: World) -> None:
        self._step, self._folder, self._world = step, folder, world
        self._profile: Any = None
        self._records = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End and write a trace in progress; an error still propagates."""
        try:
            self.close(failed=kind is not None)
        except Exception as error:
            if kind is None:
                raise
            reason = f"{type(error).__name__}: {one_line(error)}"
            log.warning("no trace of the steps that failed: %s", reason)

    def before(self, step: int) -> None:
        """Start at the coming step, if it is the first one; write the trace that `after` ended."""
        if step == self._step > 0:
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU]
            if self._world.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(
                activities=activities, experimental_config=PROFILE_ALL_THREADS()
            )
            self._profile.start()
            self._records = True
        elif step == self._step + STEPS:
            self.close()

    def after(self, step: int, *, last: bool) -> None:
        """End after the second step, or the run's last one: what follows is not a step."""
        if self._records and (last or step == self._step + STEPS - 1):
            self._stop()

    def _stop(self, *, failed: bool = False) -> None:
        self._records = False
        # After an error a collective on the device may never end.
        if self._world.device.type == "cuda" and not failed:
            torch.cuda.synchronize()
        self._profile.stop()

    def close(self, *, failed: bool = False) -> None:
        """End and write a trace in progress; `failed`: the loop has raised."""
        if self._profile is None:
            return
        if self._records:
            self._stop(failed=failed)
        profile, self._profile = self._profile, None
        folder = self._folder / FOLDER / f"iteration_{self._step}"
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"rank{self._world.rank}_trace.json"))
