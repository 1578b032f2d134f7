"""`gradsync submit`: write, check and submit a Slurm job."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from gradsync.commands.cli.launch import check_program, split
from gradsync.commands.launch import slurm
from gradsync.commands.launch.request import Program, parse_program
from gradsync.commands.launch.sbatch import JobRequest, SbatchPlan, sbatch_script
from gradsync.core.files import write_result
from gradsync.errors import ConfigError
from gradsync.runtime.arguments import parse


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions(JobRequest):
    """Submit a Slurm job: gradsync submit --time 72:00:00 [options] -- PROGRAM ARGS.

    PROGRAM is train (or verify, bench, tune), a script that ends in .py, -m MODULE, or any program.
    Slurm warns the job before its time is over; the job saves, and is requeued until it is done.
    All possible checks run before it is submitted.
    """

    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output."""
    dry_run: bool = False
    """Print the script; nothing is written or submitted."""


def run(argv: list[str]) -> int:
    """Run `gradsync submit ARGV`.

    Raises:
        ConfigError: an invalid request.
        LaunchError: this machine has no Slurm.
        RunError: Slurm refused the job (with its message), or the script cannot be written.
    """
    own, words = split(argv)
    options = parse(SubmitOptions, own, "submit")
    plan = plan_of(options, words)
    script = sbatch_script(plan)
    _check_syntax(script)
    if options.dry_run:
        print(json.dumps({"script": script}, indent=1) if options.as_json else script, end="")
        return 0
    return _submit(options, plan, script)


def plan_of(options: SubmitOptions, words: list[str]) -> SbatchPlan:
    """The request as a plan, checked as far as this machine can."""
    program = parse_program(words)
    if not options.time:
        raise ConfigError("--time is missing: the longest turn of the job, for example 24:00:00")
    check_program(program, on_this_host=not (options.module or options.setup))
    run_dir, name = options.run_dir, program.name
    if program.command == "train":
        if run_dir:
            raise ConfigError("--run-dir is for other programs; train has --out")
        ranks = options.nodes * options.ranks_per_node
        program, run_dir, name = _checked_train(program, ranks)
    request = {field.name: getattr(options, field.name) for field in fields(JobRequest)}
    request["job_name"] = options.job_name or re.sub(r"[^A-Za-z0-9._-]", "-", name)[:64]
    request |= {"run_dir": run_dir}
    return SbatchPlan(program=program, python=sys.executable, **request)


def _checked_train(program: Program, world_size: int) -> tuple[Program, str, str]:
    """The program without `--out`, the run directory, and a name for the job.

    The whole configuration is checked for `world_size` ranks, to find a typo before the job is
    queued.
    """
    from gradsync.commands.train.check import check_request
    from gradsync.commands.train.config_io import parse_config
    from gradsync.commands.train.elastic import take_flag
    from gradsync.commands.train.places import take_places

    elastic, flags = take_flag([word for word in program.arguments if word != "--json"])
    places, flags = take_places(flags)
    if places is not None:
        raise ConfigError(
            "in a job, submit's own --nodes and --gpus-per-node, before the --, say where ranks "
            "are; drop them from train"
        )
    if "--dry-run" in flags:
        raise ConfigError("--dry-run of train says nothing in a job; put it before the --")
    config = parse_config(flags)
    if config.nproc_per_node is not None:
        raise ConfigError(
            "--nproc-per-node starts ranks on one host; in a job, --ntasks-per-node (before the "
            "--) says how many each node gets"
        )
    if not elastic and world_size > 0:  # elastic chooses on the nodes
        check_request(config, world_size)
    kept, out = [], ""
    rest = iter(program.words)
    for word in rest:
        if word == "--out":
            out = next(rest, "")
        elif word.startswith("--out="):
            out = word.removeprefix("--out=")
        else:
            kept.append(word)
    return Program(words=tuple(kept)), out or config.out, config.preset


def _check_syntax(script: str) -> None:
    """Check the user's shell lines with bash, if installed."""
    if shutil.which("bash") is None:
        return
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, timeout=30, check=False
    )
    if done.returncode != 0:
        problem = done.stderr.splitlines()[0].partition("line ")[2] if done.stderr else ""
        raise ConfigError(f"--setup is no shell: bash says, line {problem or 'unknown'}")


def _submit(options: SubmitOptions, plan: SbatchPlan, script: str) -> int:
    path = Path(plan.output, f"{plan.job_name}.sbatch").absolute()
    write_result(path, script)  # creates the folder: Slurm does not, and reports nothing
    job = slurm.submit(str(path))
    log = path.with_name(f"{plan.job_name}-{job}.out")
    training = plan.program.command == "train"
    run_dir = plan.run_dir or (f"runs/{plan.job_name}-{job}" if training else "")
    human = sys.stderr if options.as_json else sys.stdout
    print(f"job {job} submitted: {path}\nlog {log}", file=human, flush=True)
    if options.as_json:
        run_dir = str(Path(run_dir).absolute()) if run_dir else ""
        paths = {"script": str(path), "log": str(log), "run_dir": run_dir}
        print(json.dumps({"job": job, "name": plan.job_name, **paths}, indent=1))
    return 0
