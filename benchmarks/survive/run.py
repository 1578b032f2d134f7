"""Runs that lose ranks: do they end with the bits of an undisturbed one, and when do they go on?

    python benchmarks/survive/run.py kills --runs 300 --out FOLDER    one or more ranks die in a run
    python benchmarks/survive/run.py walk --events 50 --out FOLDER    one run, losses and joins
    python benchmarks/survive/run.py goodput --minutes 20 --out FOLDER

`kills`: half of the runs go on live (`--on-loss shrink`), half start again from their checkpoint
(`--max-restarts`). Ranks are forked from a process that has torch loaded; a fresh interpreter takes
about 2 s of a core more. `walk` and `goodput` start real ones; `goodput` on two hosts, which are
network namespaces (root), with a cable that is cut, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from gradsync.commands.bench.experiment import environment, write_record  # noqa: E402
from support import on_host  # noqa: E402
from support.fork_server import WITH_RANKS, Forked, clean_environment  # noqa: E402
from support.namespaces import Host, two_hosts  # noqa: E402

PROGRAM = str(HERE / "program.py")
PHASES = ("data", "forward", "reduce", "commit", "update", "save")
MICRO_BATCHES, STEPS, SAVE_EVERY = 8, 24, 6
LIMIT_S = 90


def main() -> None:
    """Measure, print, and keep a record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("kills", "walk", "goodput"))
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first run")
    parser.add_argument("--events", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--every", type=float, default=30, help="seconds between faults")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.what == "kills":
        rows = kill_runs(range(options.first, options.first + options.runs))
        found = summary(rows)
    elif options.what == "walk":
        found, rows = walk(options.events, ranks=8), []
    else:
        found, rows = goodput(options.minutes * 60, options.every, ranks=options.ranks), []
    print(json.dumps(found, indent=2), flush=True)
    if options.out:
        write_record(
            options.out,
            name=f"survive {options.what}",
            command=f"python benchmarks/survive/run.py {options.what}",
            environment=environment(world_size=options.ranks, threads=1),
            data=found | ({"runs": rows} if rows else {}),
        )


# -- many runs ------------------------------------------------------------------------------------


def kill_runs(seeds: Sequence[int]) -> list[dict[str, Any]]:
    """One run for each seed; prints those that fail."""
    expected = end_of(run_once(1, "shrink", [], restarts=0)[0])
    rows = []
    for seed in seeds:
        draw = random.Random(seed)
        ranks, live = draw.randint(2, 8), seed % 2 == 0
        victims = draw.sample(range(ranks), draw.randint(1, min(3, ranks - 1)))
        kills = []
        for victim in victims:
            phase = draw.choice(PHASES)
            # Rank 0 writes, so only it can die in a save; the others die once it has written.
            phase = "saved" if phase == "save" and victim else phase
            step = draw.randrange(1, STEPS - 1)
            if phase.startswith("save"):
                step = step // SAVE_EVERY * SAVE_EVERY + SAVE_EVERY - 1
            kills.append(f"{victim}:{step}:{phase}")
        began = time.monotonic()
        lines, code = run_once(ranks, "shrink" if live else "end", kills, restarts=9)
        row = {"seed": seed, "ranks": ranks, "live": live, "kills": kills, "exit_code": code}
        row |= judge(lines, live=live, expected=expected)
        row["seconds"] = round(time.monotonic() - began, 2)
        rows.append(row)
        if not row["good"] or seed % 25 == 24:
            print(json.dumps(row), flush=True)
    return rows


def run_once(
    ranks: int, on_loss: str, kills: list[str], *, restarts: int
) -> tuple[list[dict[str, Any]], int | None]:
    """The lines of all processes of a run, in the order of time, and its exit code."""
    with tempfile.TemporaryDirectory(prefix="survive-") as name:
        more = ["--on-loss", "shrink"] if on_loss == "shrink" else ["--max-restarts", restarts]
        launch = ["-m", "gradsync", "launch", "--nproc-per-node", ranks, *more, "--", PROGRAM]
        words = [*launch, name, STEPS, on_loss, SAVE_EVERY, 64, STEPS, *kills]
        with Forked(words, clean_environment(WITH_RANKS)) as run:
            code = run.wait(LIMIT_S)
            lines = diaries(Path(name))
            if code is None or run.left():
                lines.append({"kind": "hangs or leaves processes", "at": time.monotonic()})
            said = run.finished().stderr
        if code:
            lines.append({"kind": "error", "at": time.monotonic(), "said": said[-400:]})
    return lines, code


def diaries(folder: Path) -> list[dict[str, Any]]:
    """All lines of all processes."""
    lines = []
    for path in folder.glob("*-*.jsonl"):
        for text in path.read_text().splitlines():
            lines.append(json.loads(text) | {"process": path.stem})
    return sorted(lines, key=lambda line: line["at"])


def end_of(lines: Sequence[dict[str, Any]]) -> set[tuple[int, str]]:
    """Steps and hash of weights and optimizer, of each rank that came to the end."""
    return {(line["step"], line["sha256"]) for line in lines if line["kind"] == "ends"}


def judge(lines: list[dict[str, Any]], *, live: bool, expected: Any) -> dict[str, Any]:
    """Whether a run ended as an undisturbed one, with each sample once; and how long each of its
    losses took, from the death to the next committed step."""
    ends, kinds = end_of(lines), {line["kind"] for line in lines}
    deaths = [line for line in lines if line["kind"] == "dies"]
    commits = [line for line in lines if line["kind"] == "committed"]
    waits = [
        next(
            (x["at"] - d["at"] for x in commits if x["at"] > d["at"] and x["step"] > d["step"]),
            None,
        )
        for d in deaths
    ]
    lost, repeated = count_samples(lines)
    good = ends == expected and not lost and not repeated and not kinds & {"error"}
    good = good and "hangs or leaves processes" not in kinds
    row = {"good": good, "deaths": len(deaths), "lost": lost, "repeated": repeated}
    row["recovery_s"] = [None if wait is None else round(wait, 3) for wait in waits]
    errors = [line["said"] for line in lines if line["kind"] == "error"]
    return row | ({"said": errors} if errors else {})


def count_samples(lines: list[dict[str, Any]]) -> tuple[int, int]:
    """Micro-batches that are missing from the steps that count, and those that are in twice.

    A step counts as it was dealt in the last start, in the group that committed it.
    """
    lost = repeated = 0
    commits = [line for line in lines if line["kind"] == "committed"]
    for step in range(max((line["step"] for line in commits), default=-1) + 1):
        mine = [line for line in commits if line["step"] == step]
        where = max(((x["start"], x["generation"]) for x in mine), default=None)
        dealt = [
            index
            for x in lines
            if x["kind"] == "dealt" and x["step"] == step and (x["start"], x["generation"]) == where
            for index in x["indices"]
        ]
        lost += len(set(range(MICRO_BATCHES)) - set(dealt))
        repeated += len(dealt) - len(set(dealt))
    return lost, repeated


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many runs were good, and the times from a death to the next committed step, seconds."""
    found: dict[str, Any] = {"good": sum(row["good"] for row in rows), "of": len(rows)}
    for name, live in (("live", True), ("restart", False)):
        mine = [row for row in rows if row["live"] == live]
        waits = sorted(w for row in mine for w in row["recovery_s"] if w is not None)
        found[name] = {
            "runs": len(mine),
            "good": sum(row["good"] for row in mine),
            "deaths": sum(row["deaths"] for row in mine),
            "p50_s": statistics.median(waits) if waits else None,
            "p99_s": waits[min(len(waits) - 1, round(0.99 * len(waits)))] if waits else None,
        }
    return found


# -- one long run ---------------------------------------------------------------------------------


class LongRun:
    """A run under the real launcher, with ranks started again, in a folder of its own.

    Args:
        ranks: on each host.
        hosts: namespaces; none for this host.
    """

    def __init__(
        self,
        ranks: int,
        *,
        steps: int,
        width: int,
        hosts: Sequence[Host] = (),
        silence_s: float = 1,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="survive-")
        self.path = Path(self._folder.name)
        self._said = (self.path / "said").open("a")
        launch = ["--nproc-per-node", ranks, "--on-loss", "shrink", "--rejoin", 1000]
        program = ["--", PROGRAM, self.path, steps, "shrink", 10**6, width, steps]
        start = ["-m", "gradsync", "launch"]
        if hosts:
            names = ",".join(host.namespace for host in hosts)
            start = [on_host.__file__, names, hosts[0].address]
        self._argv = [sys.executable, *map(str, (*start, *launch, *program))]
        self._silence_s = silence_s
        self.launchers = [self._launch(number) for number in range(max(len(hosts), 1))]
        self.launched = len(self.launchers)

    def _launch(self, host: int) -> subprocess.Popen[bytes]:
        paths = os.pathsep.join([str(HERE.parents[1] / "tests"), os.environ.get("PYTHONPATH", "")])
        more = {"TEST_HOST": str(host), "SILENCE_S": str(self._silence_s), "PYTHONPATH": paths}
        return subprocess.Popen(
            self._argv, stdout=subprocess.DEVNULL, stderr=self._said, env={**os.environ, **more}
        )

    def bring_back(self) -> None:
        """Start the launcher of every host again that has ended, but for the first one's."""
        for number, launcher in enumerate(self.launchers):
            if number and launcher.poll() is not None:
                self.launchers[number] = self._launch(number)
                self.launched += 1

    def processes(self) -> dict[str, int]:
        """Ids of the ranks that train, by name."""
        found = {}
        for path in self.path.glob("*-*.jsonl"):
            name, pid = path.stem.split("-")
            with open(path) as file:
                if '"starts"' in file.readline() and _state(int(pid)) not in ("", "Z", "T"):
                    found[name] = int(pid)
        return found

    def steps(self) -> int:
        """Steps committed so far."""
        lines = [x for x in diaries(self.path) if x["kind"] == "committed"]
        return max((line["step"] for line in lines), default=-1) + 1

    def stop(self) -> tuple[list[dict[str, Any]], int]:
        """Ask it to stop; its lines and exit code."""
        for launcher in self.launchers:
            launcher.send_signal(signal.SIGTERM)
        codes = [launcher.wait(90) for launcher in self.launchers]
        return diaries(self.path), max(codes, key=lambda code: code != 75)


def _state(pid: int) -> str:
    """Of a process, as in /proc; "" for none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


def wait_for(run: LongRun, ranks: int, limit_s: float = 60) -> None:
    """Until so many ranks train."""
    until = time.monotonic() + limit_s
    while len(run.processes()) < ranks:
        if time.monotonic() > until or run.launchers[0].poll() is not None:
            raise SystemExit(
                f"{run.processes()} after {limit_s} s: {(run.path / 'said').read_text()}"
            )
        time.sleep(0.05)


def same_end(lines: list[dict[str, Any]], *, steps: int, width: int) -> bool:
    """Whether a run that stopped early ended with the bits of two undisturbed ranks."""
    ends = end_of(lines)
    ((done, sha256),) = ends
    with tempfile.TemporaryDirectory(prefix="survive-") as name:
        launch = ["-m", "gradsync", "launch", "--nproc-per-node", 2, "--"]
        words = [*launch, PROGRAM, name, steps, "end", 10**6, width, done]
        subprocess.run([sys.executable, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
        return end_of(diaries(Path(name))) == {(done, sha256)}


def walk(events: int, *, ranks: int) -> dict[str, Any]:
    """Losses of one to all but one ranks at once, and joins, until there were so many."""
    draw, steps, width = random.Random(0), 20_000, 64
    run = LongRun(ranks, steps=steps, width=width)
    wait_for(run, ranks)
    losses, joins, sizes = 0, 0, [ranks]
    while losses + joins < events:
        here = run.processes()
        victims = draw.sample(sorted(here), draw.randint(1, len(here) - 1))
        for victim in victims:
            os.kill(here[victim], signal.SIGKILL)
        losses += len(victims)
        sizes.append(len(here) - len(victims))
        wait_for(run, ranks)
        joins += len(victims)
        sizes.append(ranks)
        time.sleep(draw.random())
    lines, code = run.stop()
    found = {"losses": losses, "joins": joins, "exit_code": code, "steps": max(end_of(lines))[0]}
    counted = dict(zip(("lost", "repeated"), count_samples(lines), strict=True))
    return (
        found
        | counted
        | {
            "world_sizes": sorted({x["ranks"] for x in lines if x["kind"] == "committed"}),
            "same_bits": same_end(lines, steps=steps, width=width),
        }
    )


def goodput(seconds: float, every_s: float, *, ranks: int) -> dict[str, Any]:
    """Steps in a run on two hosts with a fault every `every_s`, in turn SIGKILL, SIGSTOP and a cut
    cable, over those in one without, which runs for a tenth of the time before and after.

    The cable is cut for 1 to 8 s. The second host's launcher is started again when it has ended.
    The processors stay, whoever is lost, and serve fewer ranks; `paused` is the share of the time
    in which no step was done.
    """
    draw, width, faults = random.Random(0), 1536, []
    with two_hosts() as hosts:
        steps = round(24 * seconds)  # more than it can do; each start draws the data of all
        given: dict[str, Any] = {"steps": steps, "width": width, "hosts": hosts, "silence_s": 1}
        quiet = [_rate(ranks, seconds / 10, given)]
        run = LongRun(ranks // 2, **given)
        wait_for(run, ranks)
        began, first = time.monotonic(), run.steps()
        while (now_s := time.monotonic() - began) < seconds:
            run.bring_back()
            if now_s >= every_s * (len(faults) + 0.5):
                here = run.processes()
                if not here or run.launchers[0].poll() is not None:
                    raise SystemExit(f"nobody trains: {(run.path / 'said').read_text()}")
                kind = ("SIGKILL", "SIGSTOP", "cable")[len(faults) % 3]
                if kind == "cable":
                    cut(hosts[1], draw.uniform(1, 8))
                else:
                    os.kill(here[draw.choice(sorted(here))], signal.Signals[kind])
                faults.append({"kind": kind, "at": round(now_s, 1), "ranks": len(here)})
            time.sleep(0.1)
        ended = time.monotonic()
        took_s, done = ended - began, run.steps() - first
        lines, code = run.stop()
        quiet.append(_rate(ranks, seconds / 10, given))
    kinds = [fault["kind"] for fault in faults]
    return {
        "minutes": round(took_s / 60, 1),
        "faults": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "second_host_started": run.launched - 1,
        "ranks_at_each_fault": [fault["ranks"] for fault in faults],
        "steps_per_s": round(done / took_s, 3),
        "steps_per_s_undisturbed": [round(rate, 3) for rate in quiet],
        "goodput": round(done / took_s / statistics.mean(quiet), 4),
        "paused": round(paused_s(lines, began, ended) / took_s, 4),
        "exit_code": code,
        "same_bits": same_end(lines, steps=steps, width=width),
    }


def paused_s(lines: list[dict[str, Any]], began: float, ended: float) -> float:
    """Seconds without a step: what the long waits for the next one have above the median one."""
    first = {}
    for line in lines:
        if line["kind"] == "committed" and began < line["at"] < ended:
            first[line["step"]] = min(line["at"], first.get(line["step"], ended))
    moments = sorted(first.values())
    waits = [after - before for before, after in itertools.pairwise(moments)]
    usual = statistics.median(waits)
    return sum(wait - usual for wait in waits if wait > 5 * usual)


def cut(host: Host, seconds: float) -> None:
    """Unplug its cable for so long."""
    for number, state in enumerate(("down", "up")):
        words = ["ip", "-netns", host.namespace, "link", "set", host.interface, state]
        subprocess.run(words, check=True)
        time.sleep(seconds * (number == 0))


def _rate(ranks: int, seconds: float, given: dict[str, Any]) -> float:
    run = LongRun(ranks // 2, **given)
    wait_for(run, ranks)
    began, first = time.monotonic(), run.steps()
    time.sleep(seconds)
    rate = (run.steps() - first) / (time.monotonic() - began)
    run.stop()
    return rate


if __name__ == "__main__":
    main()
