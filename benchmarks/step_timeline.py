"""The picture of a step between two hosts in docs/guide/between-hosts.md.

    python benchmarks/step_timeline.py        (root; a minute)

Two ranks train `mini` in network namespaces at 1 Gbit/s, as network.py does, with
`gradsync train --profile`; the picture is the one of `gradsync report`.
"""

from __future__ import annotations

import os
import re
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

from network import namespaces

from gradsync.commands.report.charts import LIGHT, STYLE, timeline

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "timeline.svg"
RATE_MBIT, RANKS = 1000, 2
TRAIN = (
    *("train", "mini", "--steps=6", "--profile=4", "--micro-batch-size=1", "--seq-len=512"),
    *("--sync-options", "overlap_publish=true"),
    *(f"--tokens-per-update={512 * RANKS}", "--eval.every=0", "--sample-tokens=0", "--threads=1"),
)


def picture(run: Path) -> str:
    """The page's figure as a file, in light colours, with its legend above the bars."""
    head, _, drawn = timeline(run).removesuffix("</figure>").partition("</figcaption>")
    legend, left = [], 10.0
    for color, words in re.findall(r"var\((--c\d)\)\"></i>(.*?)</span>", head):
        sample = f'<line class="line" x1="{left:g}" x2="{left + 16:g}" y1="-6" y2="-6"'
        legend.append(f'{sample} stroke="var({color})"/><text x="{left + 21:g}" y="-2">')
        legend.append(f"{words}</text>")
        left += 36 + 6.8 * len(words)
    style = f"<style>svg{{{LIGHT}background:#fff;font-family:sans-serif}}{STYLE}</style>"
    title = '<text x="10" y="-27">Two steps (ms)</text>'
    before, width, height, after, rest = re.split(
        r"0 0 (\S+) ([^\s\"]+)([^>]*)>", drawn, maxsplit=1
    )
    box = f"{before}0 -47 {width} {float(height) + 47:g}{after}"
    return f'{box} xmlns="http://www.w3.org/2000/svg">{style}{title}{"".join(legend)}{rest}\n'


def main() -> None:
    with namespaces(RANKS) as network, tempfile.TemporaryDirectory() as folder:
        network.limit(RATE_MBIT)
        run = Path(folder) / "run"
        shared = {"WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "10.83.0.1"}
        shared |= {"MASTER_PORT": 29_400, "GRADSYNC_TOKEN": secrets.token_hex(32)}
        started = []
        for rank in range(RANKS):
            own = shared | {"RANK": rank, "LOCAL_RANK": 0, "GROUP_RANK": rank}
            host = network.hosts[rank]
            argv = ["ip", "netns", "exec", host, sys.executable, "-m", "gradsync", *TRAIN]
            variables = os.environ | {name: str(value) for name, value in own.items()}
            started.append(subprocess.Popen([*argv, f"--out={run}"], env=variables))
        codes = [process.wait() for process in started]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        PICTURE.write_text(picture(run), encoding="utf-8")
        print(f"written to {PICTURE}")


if __name__ == "__main__":
    main()
