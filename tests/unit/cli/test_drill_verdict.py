"""The verdict of a drill, from what its runs came to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.cli import drill as module
from gradsync.commands.cli.drill import Ended, describe, drill
from gradsync.commands.cli.main import main
from gradsync.commands.train.faults import FaultPlan
from gradsync.errors import ConfigError, RunError
from support import more_faults

assert more_faults.FLAGS  # its import adds "slow"
KILL = FaultPlan(kind="kill", rank=1, step=3)
GONE = "gradsync: error: rank(s) 1 vanished without a word (killed, …)"
DONE = Ended(code=0, lines=[], at=109.0, weights="abc", left=[])
FLAGS = ["tiny", "--device", "cpu"]


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let the runs of a drill end as given, with a fault at second 100 of the clock."""

    def give(disturbed: Ended, again: Ended = DONE, *, came: bool = True) -> list[str]:
        names: list[str] = []

        def watched(out: Path, start: object) -> Ended:
            folder = out.parent
            work = json.loads((folder / "work.json").read_text())
            names.append(f"{out.name}: {work['flags']}")
            if work["fault"] is None:
                return again if out.name == "disturbed" else DONE
            if came:
                Path(work["fault"]["note"]).write_text('{"at": 100.0, "step": 3, "step_s": 0.4}')
            lines = [(at, line.replace("FOLDER", str(folder))) for at, line in disturbed.lines]
            return replace(disturbed, lines=lines)

        monkeypatch.setattr(module, "_watched", watched)
        monkeypatch.setattr(module, "_saved", lambda out: 2)
        return names

    return give


def ended(*lines: tuple[float, str], **changes: Any) -> Ended:
    values = {"code": 1, "lines": list(lines), "at": 104.0, "weights": "", "left": []}
    return Ended(**{**values, **changes})  # type: ignore[arg-type]


def test_as_promised(runs: Callable[..., list[str]]) -> None:
    kept = "; stacks of the ranks are in FOLDER/disturbed/stacks"  # until the drill ends
    names = runs(ended((99.0, "step 2/7"), (102.5, GONE + kept)))
    shown: list[tuple[float, str]] = []
    verdict = drill(KILL, FLAGS, show=lambda *each: shown.append(each))
    assert [name.partition(":")[0] for name in names] == ["undisturbed", "disturbed", "disturbed"]
    assert "'tiny', '--nproc-per-node=2', '--steps=7'" in names[0]  # what the user says comes last
    assert verdict.broken == []
    assert (verdict.named_s, verdict.ended_s, verdict.steps_lost) == (2.5, 4.0, 0)
    assert shown == [(-1.0, "step 2/7"), (2.5, GONE)]
    assert describe(verdict).splitlines() == [
        "fault    kill, rank 1 of 2, step 3 (data), sync invariant",
        f"named    after 2.5 s: {GONE}",
        "ended    after 4.0 s, all ranks, exit code 1",
        "left     nothing",
        "weights  the undisturbed run's, going on from step 2 (0 steps done again)",
        "verdict  as promised",
    ]


@pytest.mark.parametrize(
    ("disturbed", "broken"),
    [
        (ended(), "nothing names the fault"),
        (ended((101.0, GONE.replace("1", "0"))), "another rank was named"),
        (ended((104.0, GONE)), "named after 4.0 s, not 3.4"),
        (ended((101.0, GONE), code=124), "exit code 124, not 1"),
        (ended((101.0, GONE), left=["process 4711"]), "left behind: process 4711"),
    ],
)
def test_a_promise_that_broke(
    runs: Callable[..., list[str]], disturbed: Ended, broken: str
) -> None:
    runs(disturbed)
    verdict = drill(KILL, FLAGS)
    assert verdict.broken == [broken]
    assert describe(verdict).endswith(f"\nverdict  NOT as promised; {broken}")


def test_weights_that_came_out_otherwise(
    runs: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = runs(ended((101.0, GONE)), ended(code=0, weights="abd"))
    assert main(["drill", "--fault=kill", "--json", "--expect=abc", "--", *FLAGS]) == 1
    assert len(names) == 2  # no undisturbed one
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["broken"] == ["other weights than undisturbed"]
    assert verdict["plan"]["kind"] == "kill"


def test_one_that_goes_on_is_not_started_again(runs: Callable[..., list[str]]) -> None:
    line = "waiting for rank 1 for 10 s: rank 1 (process 4711) is in support/more_faults.py:9 x"
    names = runs(ended((110.2, line), code=0, at=113.0, weights="abc"))
    verdict = drill(FaultPlan(kind="slow", rank=1, step=3), FLAGS)
    assert (verdict.broken, len(names), verdict.went_on_from) == ([], 2, None)


def test_what_cannot_be_drilled(runs: Callable[..., list[str]]) -> None:
    with pytest.raises(ConfigError, match=r"--rank 5, but the ranks are 0 to 1"):
        drill(FaultPlan(kind="kill", rank=5, step=3), FLAGS)
    runs(ended((1.0, "gradsync: error: no data")), came=False)
    with pytest.raises(RunError, match=r"the fault never came\ngradsync: error: no data"):
        drill(KILL, FLAGS)
    runs(ended((101.0, GONE)), ended(code=1))
    with pytest.raises(RunError, match="without the fault: exit code 1"):
        drill(KILL, FLAGS)
