"""Slurm's commands and their answers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from gradsync.errors import LaunchError, RunError

_TIMEOUT_S = 60


def ask(argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's commands and wait for it."""
    try:
        return subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {argv[0]} on this machine: submit on a login node of the cluster; "
            "--dry-run shows the script anywhere, and gradsync launch needs no Slurm"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"{argv[0]} did not answer within {_TIMEOUT_S} s; is Slurm up?") from None


def submit(script: str) -> str:
    """Submit the job script at path `script`; returns the job's id."""
    done = ask(["sbatch", "--parsable", script])
    if done.returncode != 0:
        raise RunError(f"sbatch refused the job: {own_words(done.stderr)}")
    return done.stdout.partition(";")[0].strip()


def own_words(text: str) -> str:
    """Error message of a Slurm command, on one line and without its `sbatch: error:`."""
    lines = [re.sub(r"^\w+: (error: |fatal: )?", "", line) for line in text.splitlines()]
    return "; ".join(line.strip() for line in lines if line.strip()) or "no reason given"


def state_of(job: str) -> str:
    """RUNNING, COMPLETING, CANCELLED …; "gone" if Slurm does not know the job."""
    shown = ask(["scontrol", "--oneliner", "show", "job", job])
    found = re.search(r"\sJobState=(\S+)", shown.stdout)
    return found[1] if found else "gone"
