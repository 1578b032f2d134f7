"""Jobs on a real Slurm: submitted, preempted, requeued by themselves, with the bits of one turn."""

from __future__ import annotations

import getpass
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import pytest

from gradsync.commands.cli.main import main
from support.config_flags import train_arguments
from support.launchers import Finished, clean_environment
from support.slurm_cluster import SlurmCluster
from support.small_run import make_data, small_config

pytestmark = pytest.mark.launcher("slurm")

STEPS = 25
# A run as Slurm sees one, without torch: waits for a signal in its first turn, ends in the next.
TURNS = """
import json, os, signal, sys, time
from pathlib import Path

run, others = Path(sys.argv[1]), range(int(sys.argv[2]))
names = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
rank = next(os.environ[name] for name in names if name in os.environ)
turn = os.environ.get("SLURM_RESTART_COUNT", "0")
again = turn == "0"

def wait_for(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)

heard = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda number, frame: heard.append(number))
run.mkdir(parents=True, exist_ok=True)
(run / f"up-{turn}-{rank}").touch()
if again:
    wait_for(lambda: heard)
    (run / f"heard-{rank}").write_text(signal.Signals(heard[0]).name)
    wait_for(lambda: all((run / f"heard-{other}").exists() for other in others))
if rank == "0":
    (run / "summary.json").write_text(json.dumps({"steps": 1 + int(turn)}))
    (run / "exit.json").write_text(json.dumps({"exit_code": 75 if again else 0}))
    (run / f"noted-{turn}").touch()
wait_for((run / f"noted-{turn}").exists)
sys.exit(75 if again else 0)
"""


class Submitter:
    """`gradsync submit` from one folder, and questions about what became of its jobs."""

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm = slurm
        self.folder = folder
        as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        self.env = {**slurm.env, **as_root}
        (folder / "turns.py").write_text(TURNS)

    def command(self, *argv: str) -> list[str]:
        return [sys.executable, "-m", "gradsync", "submit", *argv]

    def call(self, *argv: str) -> Finished:
        """Without `run_command`'s mark, which the job would inherit and be ended by."""
        done = subprocess.run(
            self.command(*argv),
            env=clean_environment(self.env),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Finished(tuple(done.args), done.returncode, done.stdout, done.stderr)

    def submit(self, *argv: str) -> str:
        return self.call("--time=30", *argv).ok().stdout.split()[1]  # job N submitted

    def shown(self, job: str, *names: str) -> list[tuple[str, ...]]:
        """Values of the fields `names` for each task of the job."""
        said = self.slurm.command(["scontrol", "--oneliner", "show", "job", job]).ok().stdout
        tasks = [dict(w.split("=", 1) for w in line.split() if "=" in w) for line in _lines(said)]
        return [tuple(task[name] for name in names) for task in tasks]

    def await_state(self, job: str, state: str) -> None:
        """Until all tasks are in `state`; fails with the log when one has ended otherwise."""

        def reached() -> bool:
            states = [each for (each,) in self.shown(job, "JobState")]
            assert not {"FAILED", "TIMEOUT"} & set(states), self.log() + self.slurm.logs()
            return set(states) == {state}

        self.wait_for(reached)

    def start_now(self, job: str) -> None:
        """Start a requeued job now, which Slurm would hold for two minutes.

        Slurm tells the turns of a job apart by the second: a turn that begins in the second in
        which the last one ended is refused, its credential counts as revoked.
        """
        self.await_state(job, "PENDING")
        said = [each for (each,) in self.shown(job, "SubmitTime")]  # of the requeue
        ended_s = max(datetime.fromisoformat(each).timestamp() for each in said)
        self.wait_for(lambda: time.time() >= ended_s + 2)
        self.slurm.command(["scontrol", "update", f"JobId={job}", "StartTime=now"]).ok()

    def signal(self, job: str, *options: str) -> None:
        self.slurm.command(["scancel", "--signal=USR1", *options, job]).ok()

    def log(self) -> str:
        return "\n".join(path.read_text() for path in self.folder.glob("*/*.out"))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, self.log() + self.slurm.logs()
            time.sleep(0.05)


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


@pytest.fixture
def jobs(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Submitter]:
    submitter = Submitter(slurm, tmp_path)
    yield submitter
    slurm.command(["scancel", f"--user={getpass.getuser()}"])
    submitter.wait_for(lambda: not slurm.command(["squeue", "--noheader"]).stdout)


LOSES_ITS_HOST = """
import json, os, sys
from pathlib import Path

run, here = Path(sys.argv[1]), os.environ["SLURMD_NODENAME"]
turn = os.environ.get("SLURM_RESTART_COUNT")
run.mkdir(exist_ok=True)
(run / f"turn-{turn or 0}").write_text(here)
lost = {} if turn else {"lost_hosts": f"{here}.cluster"}
(run / "exit.json").write_text(json.dumps({"exit_code": 0 if turn else 1, **lost}))
"""


def test_a_lost_host_is_left_out(jobs: Submitter, tmp_path: Path) -> None:
    (tmp_path / "loses.py").write_text(LOSES_ITS_HOST)
    run = tmp_path / "run"
    job = jobs.submit("--run-dir", str(run), "--", "loses.py", str(run))
    jobs.wait_for(lambda: "another turn" in jobs.log())
    jobs.start_now(job)
    jobs.await_state(job, "COMPLETED")
    assert (run / "turn-0").read_text() != (run / "turn-1").read_text(), jobs.log()
    assert f"lost {(run / 'turn-0').read_text()}" in jobs.log()


@pytest.mark.slow
def test_preempted_and_requeued_with_the_bits_of_one_turn(jobs: Submitter, tmp_path: Path) -> None:
    data = make_data(tmp_path / "data")
    config = small_config(tmp_path / "alone", data, steps=STEPS, tokens_per_update=64)
    assert main(train_arguments(config)) == 0

    run = tmp_path / "a run"
    arguments = [*train_arguments(config), "--out", str(run)]
    job = jobs.submit("--nodes=2", "--output=my jobs", "--job-name=bits", "--", *arguments)
    metrics = run / "metrics.jsonl"
    jobs.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2)
    jobs.signal(job)
    jobs.start_now(job)
    stopped_at = json.loads((run / "summary.json").read_text())["steps"]
    assert 2 <= stopped_at < STEPS
    assert json.loads((run / "exit.json").read_text())["exit_code"] == 75
    jobs.await_state(job, "COMPLETED")

    assert jobs.shown(job, "Restarts", "ExitCode") == [("1", "0:0")]
    log = jobs.log()
    assert f"stopped after step {stopped_at} with a checkpoint; asking Slurm for another" in log
    assert f"(step {stopped_at})" in log
    alone, requeued = (
        json.loads((folder / "summary.json").read_text()) for folder in (tmp_path / "alone", run)
    )
    assert (requeued["world_size"], requeued["launcher"]) == (2, "srun")
    assert requeued["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.launcher("mpirun")
def test_every_launcher_hands_the_signal_to_all_ranks(jobs: Submitter) -> None:
    """Side by side, as most of it is waiting."""
    program = ("--", "turns.py")
    folders = [jobs.folder / name for name in ("mpirun", "srun 3")]
    ids = {
        "mpirun": jobs.submit(
            *("--launcher=mpirun", "--ntasks-per-node=2", "--run-dir=mpirun", "--job-name=m"),
            *(*program, "mpirun", "2"),
        ),
        "srun": jobs.submit(
            *("--run-dir=srun 3", "--nodes=2", "--job-name=s"), *(*program, "srun 3", "2")
        ),
    }

    def ups(turn: int) -> bool:
        return all((each / f"up-{turn}-{rank}").exists() for each in folders for rank in (0, 1))

    jobs.wait_for(lambda: ups(0))
    jobs.signal(ids["mpirun"], "--batch")  # as `--signal=B:` of the script does
    jobs.signal(ids["srun"])
    for job in ids.values():
        jobs.start_now(job)
    for job in ids.values():
        jobs.await_state(job, "COMPLETED")
        assert set(jobs.shown(job, "Restarts", "ExitCode")) == {("1", "0:0")}
    heard = [(each / f"heard-{rank}").read_text() for each in folders for rank in (0, 1)]
    assert heard == ["SIGUSR1"] * 2 * len(folders)


def test_a_cancelled_job_stays_cancelled(jobs: Submitter) -> None:
    """It stops with a checkpoint and 75, too, and Slurm would revive it if it were asked to."""
    job = jobs.submit("--run-dir=run", "--", "turns.py", "run", "1")
    jobs.wait_for((jobs.folder / "run" / "up-0-0").exists)
    jobs.slurm.command(["scancel", job]).ok()
    jobs.await_state(job, "CANCELLED")
    jobs.wait_for(lambda: "not requeued: job" in jobs.log())
    assert jobs.shown(job, "JobState", "Restarts") == [("CANCELLED", "0")]


def test_no_endless_turns_and_the_exit_code_is_the_jobs(jobs: Submitter) -> None:
    (jobs.folder / "stop.py").write_text("print('no step', flush=True)\nraise SystemExit(75)\n")
    two = "echo '{\"fruitless\": 2}' > slurm/stop-$SLURM_JOB_ID.turns.json"
    job = jobs.submit("--job-name=stop", f"--setup={two}", "--", "stop.py")
    jobs.wait_for(lambda: jobs.shown(job, "JobState", "ExitCode") == [("FAILED", "75:0")])
    assert "no step\n" in jobs.log()
    assert "not requeued: 3 turn(s) in a row ended within 300 s" in jobs.log()


def test_slurms_own_words(jobs: Submitter) -> None:
    done = jobs.call("--time=30", "--partition=nowhere", "--", "turns.py", "run", "1")
    assert done.returncode == 1
    assert done.stderr.count("gradsync: error: ") == 1
    assert (
        "Slurm refused sbatch: sbatch: error: invalid partition specified: nowhere" in done.stderr
    )
