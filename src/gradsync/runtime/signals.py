"""Ask politely: a signal sets a flag, the loop reads it at a step boundary, all ranks agree there.

SIGTERM (scheduler), SIGUSR1 (Slurm's early warning), SIGINT (Ctrl-C) and SIGHUP (the terminal went
away) request a stop. A second SIGINT ends the process at once with exit code 130. Handlers are put
back when the block ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

# A terminal's Ctrl-C may arrive twice: once from the terminal, once forwarded by the launcher.
_SAME_PRESS_S = 1.0


class StopRequest:
    """`with StopRequest() as stop:` and then read `stop.requested` between steps.

    Outside the main thread, where Python cannot install handlers, it never fires by itself;
    `request` still works.

    Args:
        announce: answer the first signal on standard error; one rank should.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self.signal_name = ""
        self._announce = announce
        self._previous: dict[signal.Signals, object] = {}
        self._first_interrupt_s: float | None = None

    @property
    def requested(self) -> bool:
        """True once a signal asked this rank to stop."""
        return bool(self.signal_name)

    def request(self, name: str) -> None:
        """Ask for a stop, as a signal would."""
        self.signal_name = self.signal_name or name

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in HANDLED:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_interrupt_s is None:
                self._first_interrupt_s = now
            elif now - self._first_interrupt_s > _SAME_PRESS_S:
                self._end_now()
        if self._announce and not self.requested:
            hint = "; Ctrl-C again ends at once, without saving" if number == signal.SIGINT else ""
            _say(f"gradsync: stopping after this step{hint}\n")
        self.request(signal.Signals(number).name)

    def _end_now(self) -> None:
        """The user has asked twice; nothing may stand in the way."""
        if self._announce:
            show_cursor = "\x1b[?25h" if os.isatty(2) else ""
            _say(f"{show_cursor}\ngradsync: ended by a second Ctrl-C; the last checkpoint counts\n")
        os._exit(130)


def _say(text: str) -> None:
    """Write straight to standard error: a handler may interrupt Python's own writing."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
