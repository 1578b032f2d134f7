"""The page as PDF and its charts as PNG, drawn by a Chromium that is found on PATH."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from gradsync.core.files import one_line
from gradsync.errors import RunError

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_LONGEST_S = 120.0
_SCALE = 2  # Pixels of a unit


def find_browser() -> str:
    """Its path.

    Raises:
        RunError: there is none.
    """
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        raise RunError(
            f"report: no browser on PATH draws PNG and PDF (looked for {', '.join(_NAMES)}); "
            "install chromium, or write --format html or svg"
        )
    return found


def draw(browser: str, text: str, out: Path) -> None:
    """Write `text`, a page or a chart, into `out`, by its ending a PDF or a PNG; no network.

    Raises:
        RunError: the browser did not.
    """
    box = re.match(r'<svg viewBox="\S+ \S+ (\S+) (\S+)"', text)
    with TemporaryDirectory() as folder:
        page = Path(folder, "page.svg" if box else "page.html")
        page.write_text(text, encoding="utf-8")
        made = Path(folder, "made.png" if box else "made.pdf")
        command = [browser, "--headless", "--disable-gpu", "--proxy-server=127.0.0.1:9"]
        command += [f"--user-data-dir={folder}/profile", "--no-first-run", "--hide-scrollbars"]
        # Chromium's sandbox does not run for root; the page is our own and has no script.
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        if box:
            size = ",".join(f"{float(side):.0f}" for side in box.groups())
            command += [f"--window-size={size}", f"--force-device-scale-factor={_SCALE}"]
            command += [f"--screenshot={made}"]
        else:
            command += ["--no-pdf-header-footer", f"--print-to-pdf={made}"]
        try:
            done = subprocess.run(
                [*command, page.as_uri()], capture_output=True, timeout=_LONGEST_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"report: {browser} failed: {one_line(error)}") from None
        if done.returncode or not made.is_file():
            said = one_line(done.stderr.decode(errors="replace").strip()[-300:])
            raise RunError(f"report: {browser} exited with {done.returncode}: {said}")
        shutil.copyfile(made, out)
