"""The page of `gradsync report` as a real browser shows it."""

from __future__ import annotations

import json
import re
import struct
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

from gradsync.cli.main import main
from support.requirements import require
from unit.report.test_report import FAILED, add_start, event, make_run, make_trace

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


@pytest.fixture(autouse=True)
def browser() -> None:
    require("chromium")


def look(page: Path, tmp_path: Path, *, width: int, dark: bool) -> tuple[dict[str, Any], list[str]]:
    """What the browser measured, and the lines of its console.

    The page lies in a frame: a window is at least 500 pixels wide.
    """
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


def full_run(folder: Path, name: str = "first", ranks: int = 2) -> Path:
    """A run with a long name in its log, an interruption and a trace."""
    run = make_run(folder, name=name, ranks=ranks)
    add_start(run)
    add_start(run, step=10, world_size=1, reached=14, before=FAILED)
    (run / "logs" / "rank_00001.log").write_text(f"WARNING {'long' * 80}\n")
    make_trace(run, 0, [event("forward", 0, 500), event("in 0", 100, 300)])
    return run


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1180, False)])
@pytest.mark.parametrize("runs", [1, 2])
def test_a_page_in_a_browser(tmp_path: Path, width: int, dark: bool, runs: int) -> None:
    paths = [full_run(tmp_path, f"run-{n}", n) for n in range(1, runs + 1)]
    page = tmp_path / "page.html"
    assert main(["report", *map(str, paths), "--out", str(page)]) == 0
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


def test_a_page_that_loads_or_overflows_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(full_run(tmp_path)), "--out", str(page)]) == 0
    bad = '<img src="http://example.invalid/x.png"><div style="width:900px">wide</div>'
    bad += "<script>console.error('oh')</script></body>"
    page.write_text(page.read_text("utf-8").replace("</body>", bad), "utf-8")
    seen, complaints = look(page, tmp_path, width=390, dark=False)
    assert seen["wide"] > 390
    assert seen["loads"] == ["http://example.invalid/x.png"]
    assert len(complaints) == 1


def test_the_page_as_pdf_and_a_chart_as_png(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {n}, "optim/lr": {n}}}\n' for n in (1, 2))
    assert main(["report", str(run), "--format", "pdf"]) == 0
    assert (run / "report.pdf").read_bytes().startswith(b"%PDF-")
    assert main(["report", str(run), "--format", "png", "--out", str(tmp_path / "charts")]) == 0
    (chart,) = (tmp_path / "charts").iterdir()
    head = chart.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    assert struct.unpack(">II", head[16:])[0] == 960
