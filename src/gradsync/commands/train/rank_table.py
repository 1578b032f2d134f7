"""`ranks.json`: what each rank of a run is doing, for `gradsync watch`."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsync.core.files import PRIVATE, replace_text
from gradsync.runtime.activity import Activity
from gradsync.runtime.waiting import waiting_ranks

log = logging.getLogger("gradsync")

_LOOKS = 30
"""Looks at the ranks over which rates and shares are averaged."""


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
