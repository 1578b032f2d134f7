"""Stop on a signal: it sets a flag, the loop reads it at a step boundary, all ranks agree there.

SIGTERM (scheduler), SIGUSR1 (Slurm's early warning), SIGINT (Ctrl-C) and SIGHUP (the terminal
closed) request a stop. A second SIGINT ends the process at once with exit code 130. The end of the
block restores the handlers.

Without a `StopRequest`, an interrupt ends the program, and `say_interrupted` prints its line.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from gradsync.core.files import printable
from gradsync.errors import LatePeerError, PeerError
from gradsync.runtime.stacks import PACKAGE, is_library

HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)

INTERRUPTED = 130
"""Exit code of a program that Ctrl-C ended."""
LAUNCHED = "gradsync"
"""`ROLE_NAME` of the ranks that our own launcher starts."""
SAID_BY_ANOTHER = "said_by_another_rank"
"""Attribute of an error that another rank on this host also raised, and shows."""
_PR_SET_PDEATHSIG = 1
# A terminal's Ctrl-C may arrive twice: once from the terminal, once forwarded by the launcher.
_SAME_PRESS_S = 1.0
_SILENCE_S = 1.0


class StopRequest:
    """`with StopRequest() as stop:` and then read `stop.requested` between steps.

    Outside the main thread, Python cannot install handlers: signals have no effect, `request` still
    works.

    Args:
        announce: confirm the first signal on standard error; for one rank.
    """

    def __init__(self, *, announce: bool = False) -> None:
        self.signal_name = ""
        self._announce = announce
        self._previous: dict[signal.Signals, object] = {}
        self._received: set[int] = set()
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
                # nohup: the run outlives the terminal.
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyrefly: ignore[bad-argument-type]
            if number in self._received and handler == signal.SIG_DFL:
                _pass_over_the_next(number)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            now = time.monotonic()
            if self._first_interrupt_s is None:
                self._first_interrupt_s = now
            elif now - self._first_interrupt_s > _SAME_PRESS_S:  # the user has asked twice
                if self._announce:
                    cursor = "\x1b[?25h" if os.isatty(2) else ""  # shown again
                    words = "ended by a second Ctrl-C; the last checkpoint counts"
                    _say(f"{cursor}\ngradsync: {words}\n")
                os._exit(INTERRUPTED)
        self._received.add(number)
        if self._announce and not self.requested:
            hint = "; Ctrl-C again, a second later, ends at once, without saving"
            _say(f"gradsync: stopping after this step{hint if number == signal.SIGINT else ''}\n")
        self.request(signal.Signals(number).name)


def _pass_over_the_next(number: signal.Signals) -> None:
    """Let this process alone outlive one more `number`, and any number of them while it exits.

    The launcher may pass on a signal that this rank has had already, and stopped for. SIG_IGN would
    be inherited by programs that are started later, and last; Python's own exit drops handlers.
    """
    owner = os.getpid()

    def pass_over(_number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        if os.getpid() != owner:
            os.kill(os.getpid(), number)

    signal.signal(number, pass_over)
    atexit.register(signal.signal, number, signal.SIG_IGN)


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Have the system send `number` to this process when its parent ends, while the calling thread
    lives; does nothing if the system has no such call.

    Linux keeps the setting per thread: one thread asks for SIGTERM, another one for SIGCONT,
    without which a stopped process does not act on SIGTERM.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def say_interrupted(error: BaseException, who: str = "") -> None:
    """Print on standard error the line of the program that Ctrl-C hit, before the traceback.

    Does nothing for other errors, and for gradsync's own commands, which print it themselves.
    """
    if isinstance(error, KeyboardInterrupt) and (where := interrupted_line(error)):
        _say(f"gradsync: {who}interrupted (Ctrl-C) in {where}\n")


def end_program_as_said(*, leave_out_interrupts: bool, rank: int = 0) -> Callable[[], None]:
    """Show each uncaught error of the ranks once, and return a late rank's exit code.

    A rank that ends by another rank's error prints one line if that rank shows it on this host.
    With `leave_out_interrupts` Python also shows no traceback of an interrupt, or of its echo from
    another rank: one rank printed a line. Returns a function that restores the former hook.

    Args:
        leave_out_interrupts: whether our own launcher started this rank.
        rank: this one.
    """
    # Not on top of the hook that an earlier, failed session kept.
    before = getattr(sys.excepthook, "__wrapped__", sys.excepthook)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = getattr(error, "exit_code", 0)
        if leave_out_interrupts and (kind is KeyboardInterrupt or code == INTERRUPTED):
            return
        here = socket.gethostname()
        echo = isinstance(error, PeerError) and (error.rank >= 0, error.host) == (True, here)
        if echo:
            _say(f"gradsync: error: [rank {rank}] {printable(str(error).partition(chr(10))[0])}\n")
        if echo or hasattr(error, SAID_BY_ANOTHER):
            # Launchers end all ranks when the first one ends: give the failing rank time to print.
            time.sleep(_SILENCE_S)
        else:
            before(kind, error, trace)
        if code == LatePeerError.exit_code and issubclass(kind, LatePeerError | PeerError):
            raise SystemExit(code)  # Python takes it as the program's

    def put_back() -> None:
        if sys.excepthook is show:
            sys.excepthook = before

    show.__wrapped__ = before  # pyrefly: ignore[missing-attribute]
    sys.excepthook = show
    return put_back


def interrupted_line(error: KeyboardInterrupt) -> str:
    """The interrupted `file:line` of the program, "" in a command of gradsync."""
    trace = error.__traceback__
    frame = None if trace is None else trace.tb_frame
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.startswith("gradsync.commands.cli."):
            return ""
        if not name.startswith("gradsync."):
            break
        frame = frame.f_back
    where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    # In a script "<string>" is a dataclass's method or a namedtuple; in `python -c` the program.
    made = ("<string>",) if hasattr(sys.modules["__main__"], "__file__") else ()
    while trace is not None and frame is not None:
        file = trace.tb_frame.f_code.co_filename
        if trace.tb_frame is frame or not (is_library(file) or file.startswith((PACKAGE, *made))):
            where = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where


def _say(text: str) -> None:
    """Write directly to standard error: a handler may interrupt Python's own writing."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
