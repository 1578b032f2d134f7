"""What a person sees: plain lines in a file, a live line on a terminal."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest

from gradsync.train import output as progress_module
from gradsync.train.output import Progress, Tick

COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])[;m]")
"""An escape code that sets a colour, alone or after others."""
TICK = Tick(
    step=3,
    loss=2.34567,
    lr=6e-4,
    grad_norm=1.234,
    tokens_per_s=246_913.0,
    step_s=0.5,
    comm_s=0.1,
)
WORDS = "loss 2.3457  norm 1.23  lr 6.00e-04  123,456 tok/s/device  comm 20%"
LIVE_WORDS = "loss 2.3457  123,456 tok/s/device  comm 20%"


class Terminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A terminal with colours, of the usual width."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    return monkeypatch


def show(stream: io.StringIO, *, enabled: bool = True) -> str:
    """All that a short run prints."""
    progress = Progress(10, 2, enabled=enabled, stream=stream)
    progress.say("before")
    progress.start(0)
    progress.tick(TICK)
    progress.say("between")
    progress.stop()
    progress.say("after")
    return stream.getvalue()


# -- plain ----------------------------------------------------------------------------------------


def test_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter((100.0, 130.0))  # three steps in 30 s, seven to go
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    assert show(io.StringIO()).splitlines() == [
        "before",
        f"step  3/10  {WORDS}  eta 1:10",
        "between",
        "after",
    ]


def test_other_ranks_say_nothing() -> None:
    assert show(io.StringIO(), enabled=False) == ""
    assert show(Terminal(), enabled=False) == ""


def test_every_line_is_there_at_once() -> None:
    flushed = []

    class File(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    Progress(10, 1, enabled=True, stream=File()).say("now")
    assert flushed == ["now\n"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grad_norm": None}, "loss 2.3457  lr 6.00e-04"),
        ({"step_s": 0.0}, "comm 0%"),
        ({"comm_s": 0.5}, "comm 100%"),
        ({"tokens_per_s": 1.0}, "  0 tok/s/device"),
        ({"loss": float("nan")}, "loss nan"),
    ],
)
def test_odd_figures(changes: dict[str, float | None], words: str) -> None:
    fields = {name: getattr(TICK, name) for name in Tick.__slots__}
    stream = io.StringIO()
    Progress(10, 2, enabled=True, stream=stream).tick(Tick(**{**fields, **changes}))
    assert words in stream.getvalue()


@pytest.mark.parametrize(
    ("start", "step", "elapsed_s", "eta"),
    [
        (0, 100, 100.0, "15:00"),
        (0, 1, 10.0, "2:46:30"),
        (0, 1000, 1.0, "0:00"),
        (900, 950, 100.0, "1:40"),  # steps of an earlier run took no time of this one
        (500, 500, 5.0, "0:00"),  # nothing to judge by yet
    ],
)
def test_time_left(
    start: int, step: int, elapsed_s: float, eta: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter((50.0, 50.0 + elapsed_s))
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    stream = io.StringIO()
    progress = Progress(1000, 1, enabled=True, stream=stream)
    progress.start(start)
    fields = {name: getattr(TICK, name) for name in Tick.__slots__}
    progress.tick(Tick(**{**fields, "step": step}))
    assert stream.getvalue().endswith(f"  eta {eta}\n")


# -- a terminal -----------------------------------------------------------------------------------


def test_a_live_line_on_a_terminal(terminal: pytest.MonkeyPatch) -> None:
    shown = show(Terminal())
    assert COLOUR.search(shown)
    assert "\x1b[2K" in shown  # the line is written over
    text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r", "", shown)
    assert f" {LIVE_WORDS} " in text
    assert "step  3/10 " in text  # nothing is cut
    assert [line for line in ("before", "between", "after") if f"{line}\n" in text] == [
        "before",
        "between",
        "after",
    ]
    assert shown.endswith("\x1b[?25hafter\n")  # the cursor is back


@pytest.mark.parametrize("value", ["1", "true"])
def test_no_color_is_honoured(value: str, terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("NO_COLOR", value)
    shown = show(Terminal())
    assert not COLOUR.search(shown)
    assert "\x1b[2K" in shown  # still live: only the colours are gone
    assert LIVE_WORDS in shown


def test_text_is_shown_as_it_is(terminal: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    progress = Progress(10, 1, enabled=True, stream=stream)
    progress.start(0)
    text = "data /x/[bold]/[red]12 " + "long " * 60 + "end"
    progress.say(text)
    progress.stop()
    assert f"{text}\n" in stream.getvalue()  # no markup, no colours, no line breaks of our own


def test_stopping_twice_and_before_the_start(terminal: pytest.MonkeyPatch) -> None:
    progress = Progress(10, 1, enabled=True, stream=Terminal())
    progress.stop()
    progress.start(4)
    progress.stop()
    progress.stop()


def test_a_resumed_run_begins_where_it_was(terminal: pytest.MonkeyPatch) -> None:
    terminal.setenv("NO_COLOR", "1")
    stream = Terminal()
    progress = Progress(10, 1, enabled=True, stream=stream)
    progress.start(4)
    progress.stop()
    assert " 4/10" in stream.getvalue()
