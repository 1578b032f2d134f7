"""`gradsync submit`: write, check and submit a Slurm job.

[Note: how the signal travels]
The ranks must receive Slurm's warning under every launcher.
- srun: ranks are tasks of a step, and steps are signalled unless `--signal=B:` says otherwise.
- mpirun: runs in the batch shell, and its daemons on other nodes are a step that must not get the
  signal. Only the shell gets it (`B:`), and forwards it to mpirun, which sends it to all ranks.
In every script the shell forwards what it gets, as USR1: from `scancel --batch` or `--full`, or a
SIGTERM before preemption. mpirun would end its ranks within a second of a SIGTERM.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Literal

import tyro

from gradsync.commands.arguments import parse
from gradsync.commands.launch.command import Program, check_program, parse_program, split
from gradsync.commands.launch.requeue import ask
from gradsync.core.files import counted, write_result
from gradsync.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitOptions:
    """Submit a Slurm job: gradsync submit --time 72:00:00 [options] -- PROGRAM ARGS.

    PROGRAM is train (or verify, bench, tune), a script that ends in .py, -m MODULE, or any program.
    Slurm warns the job before its time is over; the job saves, and is requeued until it is done.
    All possible checks run before it is submitted.
    """

    nodes: int = 1
    """Nodes."""
    gpus_per_node: int = 0
    """GPUs of each node, one rank each; 0: a CPU job."""
    ntasks_per_node: int | None = None
    """Ranks on each node; default: one per GPU, else one."""
    time: str = ""
    """Longest turn, in sbatch's format: 72:00:00, 3-00, 90 (minutes)."""
    partition: str = ""
    """Partition."""
    account: str = ""
    """Account to charge."""
    cpus_per_task: int | None = None
    """Cores of each rank; default: the cluster's."""
    job_name: str = ""
    """Name of the job; default: the program's."""
    launcher: Literal["srun", "mpirun"] = "srun"
    """Launcher of the ranks."""
    module: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Module to load; may be given several times."""
    setup: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Shell line to run before the ranks start; may be given several times."""
    sbatch_arg: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Another option of sbatch, as --sbatch-arg=--mem=64G; may be given several times."""
    output: str = "slurm"
    """Folder for the script and the log."""
    run_dir: str = ""
    """For programs other than train: the directory to which they write exit.json."""
    warn_s: int = 120
    """Seconds between Slurm's signal and the time limit: long enough to save."""
    dry_run: bool = False
    """Print the script; nothing is written or submitted."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        given = self.ntasks_per_node
        return max(self.gpus_per_node, 1) if given is None else given


def run(argv: list[str]) -> int:
    """Run `gradsync submit ARGV`.

    Raises:
        ConfigError: an invalid request.
        LaunchError: this machine has no Slurm.
        RunError: Slurm refused the job (with its message), or the script cannot be written.
    """
    own, words = split(argv)
    options, program = completed(parse(SubmitOptions, own, "submit"), parse_program(words))
    script = sbatch_script(options, program, sys.executable)
    if options.dry_run:
        print(script, end="")
        return 0
    path = Path(options.output, f"{options.job_name}.sbatch").absolute()
    write_result(path, script)  # creates the folder: Slurm does not, and reports nothing
    job = ask("sbatch", "--parsable", str(path)).partition(";")[0].strip()
    log = path.with_name(f"{options.job_name}-{job}.out")
    print(f"job {job} submitted: {path}\nlog {log}")
    return 0


def completed(options: SubmitOptions, program: Program) -> tuple[SubmitOptions, Program]:
    """The request with its defaults, checked as far as this machine can. sbatch itself checks
    names, times and the like."""
    if not options.time:
        raise ConfigError("--time is missing: the longest turn of the job, for example 24:00:00")
    if options.gpus_per_node and options.ranks_per_node != options.gpus_per_node:
        raise ConfigError(
            f"{counted(options.ranks_per_node, 'rank')} on a node of "
            f"{counted(options.gpus_per_node, 'GPU')}: --ntasks-per-node must equal "
            "--gpus-per-node (or leave it out)"
        )
    check_program(program, on_this_host=not (options.module or options.setup))
    run_dir, name = options.run_dir, program.name
    if program.command == "train":
        if run_dir:
            raise ConfigError("--run-dir is for other programs; train has --out")
        run_dir, name = _check_train(program, options.nodes * options.ranks_per_node)
    job_name = options.job_name or re.sub(r"[^A-Za-z0-9._-]", "-", name)[:64]
    return replace(options, job_name=job_name, run_dir=run_dir), program


def _check_train(program: Program, world_size: int) -> tuple[str, str]:
    """The run directory, "" for none, and a name for the job.

    The whole configuration is checked for `world_size` ranks, to find a typo before the job is
    queued.
    """
    from gradsync.commands.train.check import check_request
    from gradsync.commands.train.config_io import parse_config
    from gradsync.commands.train.elastic import take_flag

    elastic, flags = take_flag([word for word in program.arguments if word != "--json"])
    config = parse_config(flags)
    if config.nproc_per_node is not None:
        raise ConfigError(
            "--nproc-per-node starts ranks on one host; in a job, --ntasks-per-node (before the "
            "--) says how many each node gets"
        )
    if not elastic and world_size > 0:  # elastic chooses on the nodes
        check_request(config, world_size)
    return config.out, config.preset


def sbatch_script(options: SubmitOptions, program: Program, python: str) -> str:
    """The job script, readable and valid for `sbatch`; `python` is the interpreter on the nodes.

    Names, paths and arguments are data: each is quoted by `shlex.quote`, or, in a directive, by
    `_directive`. Only `options.setup` is shell.
    """
    from jinja2 import Environment, StrictUndefined

    source = resources.files("gradsync.commands.launch").joinpath("job.sbatch.j2")
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters |= {"quote": shlex.quote, "directive": _directive}
    words = list(map(shlex.quote, program.words))
    if program.command == "train" and not options.run_dir:
        words += ["--out", '"$run_dir"']
    return environment.from_string(source.read_text("utf-8")).render(
        job=options, program=program, words=words, python=python
    )


def _directive(text: str) -> str:
    """`text` as the value of a `#SBATCH` option: unchanged, or in double quotes."""
    return text if _PLAIN.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'
