"""`gradsync report`: figures are those of the run's files, and the page needs nothing else."""

from __future__ import annotations

import json
import math
import re
import subprocess
import time
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gradsync.commands.cli.main import main
from gradsync.commands.report.charts import (
    Chart,
    Line,
    figure,
    read_spans,
    svg,
    thinned,
    ticks,
    timeline,
    whole_ticks,
)
from gradsync.commands.report.page import charts_of, page
from gradsync.commands.report.run import read_run
from support.requirements import require

STEPS = 30


def make_run(folder: Path, *, ranks: int = 2, name: str = "first", **config: object) -> Path:
    """A run's files, as `gradsync train` leaves them."""
    path = folder / name
    (path / "logs").mkdir(parents=True)
    lines: list[dict[str, object]] = [
        {
            "step": step,
            "train/loss": 5 / step,
            "optim/lr": 1e-3 * step,
            "optim/grad_norm": 1.5,
            "perf/tokens_per_s": 1000.0 * ranks,
            "perf/step_s": 0.5,
            "perf/data_s": 0.05,
            "perf/forward_s": 0.1,
            "perf/backward_s": 0.2,
            "perf/update_s": 0.03,
            "comm/exposed_s": 0.1,
            "mem/max_reserved_gib": 0.25,
            "perf/mfu": 0.125,
        }
        for step in range(1, STEPS + 1)
    ]
    lines.append({"step": STEPS, "val/loss": 0.25})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = {
        "steps": STEPS,
        "final_train_loss": 5 / STEPS,
        "val_loss": 0.25,
        "tokens_per_s": 1000.0 * ranks,
        "world_size": ranks,
        "exposed_comm_fraction": 0.2,
        "weights_sha256": "ab" * 32,
    }
    (path / "summary.json").write_text(json.dumps(summary))
    settings = {"preset": "tiny", "sync": "invariant", "optim": {"lr": 0.003}, **config}
    (path / "config.yaml").write_text(json.dumps(settings))
    (path / "exit.json").write_text(json.dumps({"exit_code": 0, "reason": "done"}))
    environment = {"launcher": "torchrun", "world_size": ranks, "device": "cpu", "torch": "2.13"}
    environment["peak_tflops"] = 312.0
    (path / "env.json").write_text(json.dumps(environment))
    log = "10:00 INFO started\n10:01 WARNING rank 1 is slow\n"
    (path / "logs" / "rank_00000.log").write_text(log)
    return path


class Tags(HTMLParser):
    """Tags that are open, and attributes that name something to load."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {k}" for k, _ in attrs if k in ("src", "href", "xlink:href")]
        self.loads += [tag] if tag in ("script", "link", "iframe", "img") else []
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read_page(text: str) -> Tags:
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    return tags


def test_a_page_stands_alone_and_has_the_figures_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"written to {run / 'report.html'}\n"
    text = (run / "report.html").read_text("utf-8")
    tags = read_page(text)
    assert tags.loads == []
    assert not re.search(r"https?://|@import|url\(", text)
    for said in (
        "0.2500",
        "0.1667",
        "2,000",
        "20.0 %",
        "12.5 %MFU",
        "abababab…",
        "done",
        "rank 1 is slow",
    ):
        assert said in tags.text
    assert "INFO" not in tags.text


def test_points_are_those_of_the_metrics(tmp_path: Path) -> None:
    charts = {chart.title: chart for chart in charts_of(read_run(make_run(tmp_path)))}
    loss, held_out = charts["Loss"].lines
    assert loss.points == [(step, 5 / step) for step in range(1, STEPS + 1)]
    assert held_out.points == [(STEPS, 0.25)]
    parts = {line.name: line.points[0][1] for line in charts["Where a step's time went"].lines}
    assert parts == pytest.approx(
        {
            "forward": 100,
            "backward": 200,
            "update": 30,
            "exposed communication": 100,
            "waiting for data": 50,
            "the rest": 20,
        }
    )
    assert charts["Model FLOPs utilisation"].lines[0].points[-1] == (STEPS, 12.5)


def test_comparisons_of_bits_are_sentences(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    with (path / "metrics.jsonl").open("a") as file:
        for step, equal in ((10, 1), (20, 0)):
            file.write(json.dumps({"step": step, "check/replicas_equal": equal}) + "\n")
    text = read_page(page(read_run(path))).text
    assert "Replicas compared 2 times: different bits after step 20" in text


def add_start(run: Path, **fields: object) -> None:
    with (run / "starts.jsonl").open("a") as file:
        file.write(json.dumps({"step": 0, "world_size": 2, **fields}) + "\n")


FAILED = {"exit_code": 1, "reason": "failed", "error": "rank 1 vanished\nmore"}


def test_interruptions_stand_in_a_list_and_in_each_chart(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    add_start(run)
    add_start(run, step=10, world_size=1, reached=14, before=FAILED)
    add_start(run, step=20, world_size=1, reached=20, before={"exit_code": 75, "reason": "a stop"})
    add_start(run, step=25, world_size=1, reached=27)
    add_start(run, step="x")
    (run / "exit.json").write_text(json.dumps({"exit_code": 124, "reason": "too late"}))
    found = read_run(run)
    assert [event[:3] for event in found.events] == [
        (
            10,
            "after step 14: exit code 1: failed, rank 1 vanished; went on from step 10 with 1 rank "
            "in place of 2",
            True,
        ),
        (20, "after step 20: a stop; went on from step 20 with 1 rank", False),
        (25, "after step 27: killed; went on from step 25 with 1 rank", True),
        (30, "after step 30: exit code 124: too late", True),
    ]
    assert found.problems == ["starts.jsonl, line 5: not an object with a step and world_size"]
    charts = charts_of(found)
    assert all(chart.events == found.events for chart in charts)
    text = page(found)
    assert text.count('<line class="event') == 4 * sum(bool(svg(chart)) for chart in charts)
    assert "after step 14: exit code 1" in read_page(text).text
    older = make_run(tmp_path, name="older")
    add_start(older)
    add_start(older, step=10, reached=12)
    (event,) = read_run(older).events
    assert event.words == "after step 12: killed; went on from step 10 with 2 ranks"
    assert "Events" not in page(read_run(make_run(tmp_path, name="whole")))


def test_a_run_that_began_beside_other_programs_says_so(tmp_path: Path) -> None:
    path = make_run(tmp_path)
    assert "was busy" not in page(read_run(path))
    environment = json.loads((path / "env.json").read_text())
    (path / "env.json").write_text(json.dumps(environment | {"load_at_start": 6.1, "cores": 4}))
    assert "was busy in the last minute: load 6.1 on 4 cores" in page(read_run(path))


def test_an_error_is_told_once(tmp_path: Path) -> None:
    """No traceback is shown; what a rank says besides stays."""
    run = make_run(tmp_path)
    error = f"rank(s) 1 vanished without a word; this rank (0) saw: {'very ' * 60}long"
    (run / "exit.json").write_text(json.dumps({"exit_code": 1, "reason": "failed", "error": error}))
    log = "10:02 INFO well\n10:03 WARNING late\nTraceback (most recent call last):\n  File x\n"
    (run / "logs" / "rank_00001.log").write_text(f"{log}gradsync.errors.LostPeerError: {error}\n")
    text = page(read_run(run))
    assert text.count(error) == 1
    assert "<li class=bad>after step 30: exit code 1: failed</li>" in text
    (shown,) = re.findall(r"<h2>Warnings and errors</h2><pre>(.*?)</pre>", text, re.DOTALL)
    assert shown.splitlines()[-1] == "[1] 10:03 WARNING late"


def test_the_ranks_of_every_start_are_named(tmp_path: Path) -> None:
    path = make_run(tmp_path, ranks=1)
    add_start(path)
    add_start(path, step=20, world_size=1, before={"exit_code": 75, "reason": "a stop"})
    assert "2, then 1 rank by torchrun" in page(read_run(path))


def test_the_figures_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    assert main(["report", "--json", str(run)]) == 0
    assert json.loads(capsys.readouterr().out)["validation loss"] == "0.2500"
    assert not (run / "report.html").exists()


def test_what_is_missing_or_torn_is_said(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name in ("summary.json", "exit.json", "env.json"):
        (run / name).unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n{"step": "x"}\n{"step": 31, "train/loss": null, "odd": "<b>"}\n{"step": 3')
    (run / "config.yaml").write_text("preset: tiny\noptim: {lr: 0.1}\n")
    found = read_run(run)
    assert len(found.problems) == 3
    assert found.config == {"preset": "tiny", "optim.lr": 0.1}
    text = read_page(page(found)).text
    assert "still running, or killed" in text
    (run / "ranks.json").write_text(json.dumps({"time": time.time(), "every_s": 1.0, "ranks": []}))
    assert " · running" in read_page(page(read_run(run))).text
    assert "metrics.jsonl, line 32" in text
    assert "0.1667" in text


def test_a_run_that_has_logged_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert "No step was logged yet." in read_page(page(read_run(tmp_path))).text


def test_text_from_files_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>&\"'"
    run = make_run(tmp_path, name="<img src=x>", preset=evil, note=evil)
    (run / "exit.json").write_text(json.dumps({"exit_code": 1, "reason": evil}))
    (run / "logs" / "rank_00001.log").write_text(f"ERROR {evil}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 31, evil: 1.0}) + "\n")
    tags = read_page(page(read_run(run)))
    assert tags.loads == []
    assert tags.text.count("<script>alert(1)</script>") >= 4


@pytest.mark.parametrize("arguments", [[], ["nowhere"]])
def test_bad_arguments(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *arguments]) == 2
    assert "run directory" in capsys.readouterr().err


# -- timeline --------------------------------------------------------------------------------------


def event(name: str, begin: float, length: float, **more: object) -> dict[str, object]:
    cat = "user_annotation"
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length, "tid": 1, **more}


def make_trace(run: Path, rank: int, events: list[object]) -> None:
    folder = run / "profile_trace" / "iteration_4"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{rank}_trace.json").write_text(json.dumps({"traceEvents": events}))


def test_the_timeline_shows_what_the_traces_say(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    mine = [
        event("forward", 1000, 5000),
        event("backward", 6000, 9000),
        event("in 0", 8000, 2000),
        event("in 1", 9000, 5000),
        event("step", 15_000, 1000),
        event("out 1", 16_000, 3000),
        event("update 1", 20_000, 500),
        event("gloo:all_reduce", 15_100, 300, cat="cpu_op"),
        event("aten::mm", 1000, 10, cat="cpu_op"),
        event("forward", 0, 1, ph="i"),
    ]
    make_trace(run, 0, mine)
    make_trace(run, 1, [event("forward", 2000, 5000)])
    make_trace(run, 2, [])
    (run / "profile_trace" / "iteration_4" / "rank3_trace.json").write_text("{")
    found = read_spans(run)
    assert [(s.kind, s.bucket, s.begin, s.end) for s in found if s.rank == 0] == [
        ("forward", -1, 0, 5000),
        ("backward", -1, 5000, 14_000),
        ("in", 0, 7000, 9000),
        ("in", 1, 8000, 13_000),
        ("step", -1, 14_000, 15_000),
        ("out", 1, 15_000, 18_000),
        ("update", 1, 19_000, 19_500),
    ]
    tags = read_page(page(read_run(run)))
    for said in ("rank 0 computes", "rank 0 communicates", "rank 1 computes", "in 2: 5.0 ms"):
        assert said in tags.text
    assert "rank 1 communicates" not in tags.text
    drawn = timeline(run).partition("</figcaption>")[2].removesuffix("</figure>")
    bars = ElementTree.fromstring(drawn).findall("rect")
    tops = {bar[0].text: float(bar.attrib["y"]) for bar in bars}
    assert tops["in 1: 2.0 ms"] < tops["in 2: 5.0 ms"], "one below the other, since both are shown"


def test_collectives_of_a_library_are_bars_where_nothing_else_is(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    make_trace(run, 0, [event("forward", 0, 10), event("nccl:all_reduce", 5, 9, cat="kernel")])
    assert [(s.kind, s.bucket) for s in read_spans(run)] == [("forward", -1), ("sum", -2)]
    assert timeline(make_run(tmp_path, name="none")) == ""


# -- charts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (3, 3), (-2, 5), (1e-6, 3e-6), (0, 123456), (0, 0), (99.9, 100.1)]
)
def test_ticks_enclose_and_are_round(low: float, high: float) -> None:
    found = ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert 2 <= len(found) <= 8
    assert found == sorted(set(found))


def test_ticks_of_steps_are_whole() -> None:
    assert whole_ticks(1, 4) == [1, 2, 3, 4]
    assert whole_ticks(5, 5) == [5]
    assert all(tick == int(tick) for tick in whole_ticks(0, 1000))


def test_thinning_keeps_ends_and_extremes() -> None:
    points = [(float(x), math.sin(x / 50)) for x in range(10_000)]
    points[4321] = (4321.0, 9.0)
    points[7000] = (7000.0, -9.0)
    kept = thinned(points)
    assert len(kept) < 500
    assert {points[0], points[-1], points[4321], points[7000]} <= set(kept)
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)


def test_what_is_not_finite_is_left_out() -> None:
    line = Line(name="a", points=[(1, 1.0), (2, math.nan), (3, math.inf), (4, 2.0)])
    drawn = svg(Chart(title="t", lines=[line]))
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert svg(Chart(title="t", lines=[Line(name="a", points=[(1, math.nan)])])) == ""
    assert figure(Chart(title="t", lines=[])) == ""


# -- in a browser ----------------------------------------------------------------------------------

LOOK = """<script>addEventListener("load", () => {
  const all = name => [...document.querySelectorAll(name)];
  const box = each => each.getBoundingClientRect();
  const style = getComputedStyle(document.body);
  parent.document.documentElement.setAttribute("data-seen", JSON.stringify({
    inner: innerWidth,
    wide: document.documentElement.scrollWidth,
    loads: performance.getEntriesByType("resource").map(each => each.name),
    drawn: all("path.line, path.area, figure.all rect").filter(each => box(each).width > 0).length,
    outside: all(".charts svg, .cards div, h1, li, pre").filter(
      each => box(each).right > innerWidth || box(each).left < 0).length,
    letters: all(".charts svg").map(each => each.clientWidth / each.viewBox.baseVal.width
      * parseFloat(getComputedStyle(each.querySelector("text")).fontSize)),
    paper: style.backgroundColor,
    line: getComputedStyle(document.querySelector("path.line")).stroke,
  }));
});</script>"""
"""Measures the page, which has no script of its own."""


def look(page: Path, tmp_path: Path, *, width: int, dark: bool) -> tuple[dict[str, Any], list[str]]:
    """Measurements of a browser, and the lines of its console.

    The page lies in a frame: a window is at least 500 pixels wide.
    """
    require("chromium")
    text = page.read_text("utf-8").replace("</body>", f"{LOOK}</body>")
    copy = tmp_path / "looked-at.html"
    frame = f'<iframe style="width:{width}px;height:800px;border:0" srcdoc="{escape(text)}">'
    copy.write_text(f'<meta name="color-scheme" content="light dark">{frame}</iframe>', "utf-8")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--enable-logging=stderr", "--v=0", "--proxy-server=127.0.0.1:9"]
    command += ["--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--window-size=1300,900"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return json.loads(seen[1].replace("&quot;", '"')), complaints


def full_run(folder: Path) -> Path:
    """A run with a long name in its log, an interruption and a trace."""
    run = make_run(folder)
    add_start(run)
    add_start(run, step=10, world_size=1, reached=14, before=FAILED)
    (run / "logs" / "rank_00001.log").write_text(f"WARNING {'long' * 80}\n")
    make_trace(run, 0, [event("forward", 0, 500), event("in 0", 100, 300)])
    return run


@pytest.mark.parametrize("width", [390, 1180])
@pytest.mark.parametrize("dark", [False, True])
def test_a_page_in_a_browser(tmp_path: Path, width: int, dark: bool) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(full_run(tmp_path)), "--out", str(page)]) == 0
    seen, complaints = look(page, tmp_path, width=width, dark=dark)
    assert complaints == []
    assert seen["loads"] == []
    assert seen["inner"] == width
    assert seen["wide"] <= width
    assert seen["outside"] == 0
    assert seen["drawn"] > 10
    assert min(seen["letters"]) >= 9  # pixels
    assert seen["paper"] == ("rgb(20, 23, 28)" if dark else "rgb(255, 255, 255)")
    assert seen["line"] == ("rgb(110, 163, 255)" if dark else "rgb(47, 111, 223)")
