"""Configurations and launcher variables that are almost right: understood, or refused at once."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from hypothesis import given

from gradsync.commands.cli.doctor import launcher_document, launcher_text
from gradsync.commands.plan.catalog import hardware_of
from gradsync.commands.plan.hardware_file import dump_hardware, load_hardware
from gradsync.commands.train.check import check_request
from gradsync.commands.train.config import TrainConfig, recipe
from gradsync.commands.train.config_io import parse_config, write_config
from gradsync.errors import GradsyncError, LaunchError
from gradsync.runtime.coordinator import System, plan_coordinator
from gradsync.runtime.resolve import resolve
from support.fuzz import changed, damaged, fuzzed, randoms, within_seconds

CONFIG = asdict(recipe("mini"))
NAMES = [
    *(f"{key}.{name}" for key, part in CONFIG.items() if isinstance(part, dict) for name in part),
    *(key for key, part in CONFIG.items() if not isinstance(part, dict)),
]
HARDWARE = yaml.safe_load(dump_hardware(hardware_of("h100x4@2")))
DIGITS = ("9" * 5_000, "9" * 18, "9" * 19, "-1", "0", "1", "2", "4", "+1", "٣", "1_0", "0x1", "1e3")
RAW = (
    *("&a [*a]", "*a", "&a {<<: *a}", "!!timestamp x", "2026-13-45", "0x" + "f" * 2_000, "5:00"),
    *('!!float ""', "!!int {}", "!!set {a}", "!!python/object:a.b {}", "? [a]", "[[[", "|", "yes"),
    *("{a: 1, a: 2}", "~", ".nan", "1e400", '"\\0"', '"\\ud800"', "- 1", "[" * 3_000, "\t", "---"),
    *("a: b: c", "%YAML 9.9", "{" * 3_000, "a" * 5_000, "&a " * 100 + "1", "=", "<<", "\ufeff"),
)
FLAGS = ("--", "-", "---", "--=", "-x", "--no-tf32=1", "\udcff", "--optim", "", "--steps", "--no-")
VALUES = (*DIGITS, "nan", "inf", "-inf", "1e300", "None", "True", "", " ", "x" * 5_000, "pp=2,tp=2")


def text_of(document: Any, random: Random, suffix: str) -> bytes:
    """As YAML or TOML, sometimes with a line that is hardly either, or bytes damaged."""
    if suffix == ".toml":
        rows = document.items() if isinstance(document, dict) else [("a", document)]
        lines = [f"{key} = {json.dumps(value)}".replace(": ", " = ") for key, value in rows]
    elif suffix == ".json":
        lines = [json.dumps(document)]
    else:
        lines = yaml.safe_dump(document).splitlines()
    for _ in range(random.choice((0, 0, 1, 2))):
        at = random.randrange(len(lines) + 1)
        head = (lines[at] if at < len(lines) else random.choice(NAMES)).partition(":")[0]
        lines[at : at + random.randrange(2)] = [f"{head}: {random.choice((*RAW, *DIGITS))}"]
    text = "\n".join(lines).encode(errors="surrogatepass")
    return damaged(text, random) if random.random() < 0.3 else text


@contextlib.contextmanager
def understood_or_refused() -> Any:
    """Within five seconds, by an error of the package in one line, or by the exit code 2."""
    said, code = "", 2
    with within_seconds(), contextlib.redirect_stderr(io.StringIO()):
        try:
            yield
        except GradsyncError as error:
            said = str(error).partition(". What each launcher family says:\n")[0]
        except SystemExit as stop:
            code = stop.code
    assert code == 2
    assert "\n" not in said
    assert len(said) < 2_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@given(randoms)
@fuzzed
def test_configurations(folder: Path, random: Random) -> None:
    path = folder / f"a{random.choice(('.yaml', '.toml', '.yaml'))}"
    path.write_bytes(text_of(changed(CONFIG, random), random, path.suffix))
    flags = random.choice(((), (), ("--steps", "3"), _flags(random)))
    config: TrainConfig | None = None
    with understood_or_refused():
        config = parse_config([str(path) if random.random() < 0.9 else "tiny", *flags])
        check_request(config, random.choice((1, 2, 3)))
    if config is not None:
        write_config(config, folder / "again.yaml")
        assert parse_config([str(folder / "again.yaml")]) == replace(config, nproc_per_node=None)


def _flags(random: Random) -> list[str]:
    def flag() -> list[str]:
        name, value = random.choice(NAMES).replace("_", "-"), random.choice(VALUES)
        return random.choice(
            ([f"--{name}", value], [f"--{name}={value}"], [random.choice(FLAGS)], [value])
        )

    return [word for _ in range(random.randint(1, 4)) for word in flag()]


@given(randoms)
@fuzzed
def test_hardware(folder: Path, random: Random) -> None:
    path = folder / f"h{random.choice(('.yaml', '.json'))}"
    path.write_bytes(text_of(changed(HARDWARE, random), random, path.suffix))
    with understood_or_refused():
        assert load_hardware(str(path)).hosts


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

    with understood_or_refused():
        resolution = resolve(env)
        try:
            system = System(asked, asked, ancestor=lambda: "mpirun")
            plan = plan_coordinator(env, resolution, system)
        except LaunchError:
            return
        launcher_text(resolution, plan)
        json.dumps(launcher_document(resolution, plan))
