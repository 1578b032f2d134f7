"""Launcher variables that are almost right: understood, or refused at once."""

from __future__ import annotations

import json
from contextlib import suppress
from random import Random

from hypothesis import given

from gradsync.commands.cli.doctor import launcher_document, launcher_text
from gradsync.errors import LaunchError
from gradsync.runtime.coordinator import System, plan_coordinator
from gradsync.runtime.resolve import resolve
from support.fuzz import fuzzed, randoms, within_seconds

DIGITS = ("9" * 5_000, "9" * 18, "9" * 19, "-1", "0", "1", "2", "4", "+1", "٣", "1_0", "0x1", "1e3")


def _comm_world(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_COMM_WORLD_{n}" for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


FAMILIES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    _comm_world("OMPI"),
    _comm_world("MV2"),
    ("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "FLUX_JOB_ID"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_LOCAL_RANK"),
    (
        *("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
        *("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_GTIDS"),
    ),
)
OTHERS = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"),
    *("MASTER_ADDR", "MASTER_PORT", "SLURM_RESTART_COUNT", "SLURM_NTASKS", "SLURM_NPROCS"),
    *("SLURM_STEP_NUM_NODES", "SLURM_JOB_NODELIST", "PMIX_NAMESPACE"),
)
SAID = (
    *DIGITS,
    *("", " ", "a", "a b", "\udcff", "n[1-3]", "n[1-", "n[3-1]", "n[1-999999999]", "a,,b"),
    *("4(x2),3", "4(x999999999)", "1(x2)", "(x2)", ",", "-x", "/etc/passwd", "True", "0,1", "::1"),
    *("localhost", "head", "a" * 300, "n[" * 2_000, "0," * 2_000, "n[0-1][0-1]" * 9, "4294967280"),
)


@given(randoms)
@fuzzed
def test_launcher_variables(random: Random) -> None:
    env = {}
    for family in random.sample(FAMILIES, random.choice((0, 1, 1, 1, 2, 3))):
        rank, size = random.choice((("0", "1"), ("0", "2"), ("1", "2"), ("2", "4")))
        env |= {name: random.choice((rank, size)) for name in family}
        env |= dict(zip(family, (rank, size, random.choice(("0", rank)), size), strict=False))
    for name in random.sample(sorted({*env, *OTHERS}), min(len(env) + 4, random.randrange(6))):
        env[name] = random.choice(SAID)
    for name in random.sample(sorted(env), min(len(env), random.choice((0, 0, 1, 2)))):
        del env[name]

    def asked(*_: object) -> str:
        if random.random() < 0.5:
            raise OSError("no answer")
        return random.choice((*SAID, '{"execution": {"nodelist": ["n[0-1]"]}}', "NodeAddr=n1 "))

    with within_seconds(), suppress(LaunchError):
        resolution = resolve(env)
        system = System(asked, asked, ancestor=lambda: "mpirun")
        plan = plan_coordinator(env, resolution, system)
        launcher_text(resolution, plan)
        json.dumps(launcher_document(resolution, plan))
