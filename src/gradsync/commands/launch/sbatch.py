"""A Slurm job as a checked value, and the text of its script. Pure.

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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import tyro

from gradsync.commands.launch.request import Program
from gradsync.core.files import counted
from gradsync.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_JOB = '"$SLURM_JOB_ID"'


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """Slurm's part of a job, under the names of its flags."""

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

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node."""
        given = self.ntasks_per_node
        return max(self.gpus_per_node, 1) if given is None else given

    def check_numbers(self) -> None:
        """Raise ConfigError for invalid numbers, or ranks that do not fit the GPUs."""
        for flag, value, smallest in (
            ("--nodes", self.nodes, 1),
            ("--ntasks-per-node", self.ntasks_per_node, 1),
            ("--gpus-per-node", self.gpus_per_node, 0),
            ("--cpus-per-task", self.cpus_per_task, 1),
            ("--warn-s", self.warn_s, 1),
        ):
            require(
                value is None or value >= smallest,
                f"{flag} must be at least {smallest}; got {value}",
            )
        if self.gpus_per_node and self.ranks_per_node != self.gpus_per_node:
            raise ConfigError(
                f"{counted(self.ranks_per_node, 'rank')} on a node of "
                f"{counted(self.gpus_per_node, 'GPU')}: --ntasks-per-node must equal "
                "--gpus-per-node (or leave it out)"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SbatchPlan(JobRequest):
    """One Slurm job. sbatch itself checks names, times and the like; what it
    would take silently for something else is refused on creation.

    `run_dir` will hold exit.json; "" creates a directory per job for `train`, and means no
    exit.json for other programs.
    """

    program: Program  # command of each rank
    python: str = "python"  # interpreter on the nodes

    def __post_init__(self) -> None:
        self.check_numbers()
        self._check_words()

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nodes * self.ranks_per_node

    def _check_words(self) -> None:
        require(self.job_name != "", "--job-name must not be empty")
        require("/" not in self.job_name, "--job-name is part of file names: it holds no /")
        require(self.output != "", "--output must name a folder")
        for name in ("job_name", "time", "partition", "account", "output"):
            _check_line(f"--{name.replace('_', '-')}", getattr(self, name))
        for argument in self.sbatch_arg:
            _check_line("--sbatch-arg", argument)


def require(holds: bool, message: str) -> None:
    """Raise ConfigError with `message` unless it holds."""
    if not holds:
        raise ConfigError(message)


def _check_line(flag: str, value: str) -> None:
    """Slurm reads directives line by line: a value must not end a line or start a directive."""
    require(
        value.isprintable() and "#SBATCH" not in value and "\\" not in value,
        f"{flag} must be one printable line without #SBATCH or a backslash; got {value[:80]!r}",
    )


def sbatch_script(plan: SbatchPlan) -> str:
    """The job script for `plan`, readable and valid for `sbatch`.

    Names, paths and arguments are data: each is quoted by `shlex.quote`, or, in a directive, by
    `directive_value`. Only `plan.setup` is shell.
    """
    from jinja2 import Environment, StrictUndefined

    source = (
        resources.files("gradsync.commands.launch").joinpath("job.sbatch.j2").read_text("utf-8")
    )
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(source).render(
        headline=_headline(plan),
        directives=_directives(plan),
        modules=list(map(shlex.quote, plan.module)),
        setup=plan.setup,
        python=shlex.quote(plan.python),
        run_dir=_run_dir(plan),
        launcher=plan.launcher,
        signal_note=_signal_note(plan),
        command=_lines([*_launcher_words(plan), *_program_words(plan)]),
        afterwards=_lines(_afterwards(plan)),
    )


def directive_value(text: str) -> str:
    """`text` as the value of a `#SBATCH` option: unchanged, or in double quotes."""
    return text if _PLAIN.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def _headline(plan: SbatchPlan) -> str:
    each = counted(plan.ranks_per_node, "rank")
    if plan.gpus_per_node:
        each += ", one a GPU"
    nodes = counted(plan.nodes, "node")
    return f"{plan.job_name}: {nodes} with {each}, started by {plan.launcher}."


def _directives(plan: SbatchPlan) -> list[str]:
    only_shell = "B:" if plan.launcher == "mpirun" else ""
    log = f"{plan.output.replace('%', '%%')}/%x-%j.out"
    options: list[tuple[str, object]] = [
        ("job-name", plan.job_name),
        ("nodes", plan.nodes),
        ("ntasks-per-node", plan.ranks_per_node),
        ("cpus-per-task", plan.cpus_per_task),
        ("gres", f"gpu:{plan.gpus_per_node}" if plan.gpus_per_node else None),
        ("time", plan.time),
        ("partition", plan.partition),
        ("account", plan.account),
        ("signal", f"{only_shell}USR1@{plan.warn_s}"),
        ("open-mode", "append"),
        ("output", log),
    ]
    given = [
        f"--{name}={directive_value(str(value))}" for name, value in options if value or value == 0
    ]
    return [*given, "--requeue", *map(_free_directive, plan.sbatch_arg)]


def _free_directive(directive: str) -> str:
    name, equals, value = directive.partition("=")
    return f"{name}={directive_value(value)}" if equals and value else directive


def _run_dir(plan: SbatchPlan) -> str:
    if plan.run_dir:
        return shlex.quote(plan.run_dir)
    if plan.program.command != "train":
        return ""
    return shlex.quote(f"runs/{plan.job_name}-") + _JOB


def _signal_note(plan: SbatchPlan) -> str:
    if plan.launcher == "mpirun":
        return "Slurm's warning comes to this shell alone; mpirun hands USR1 to all ranks."
    return "Slurm warns the ranks themselves. What this shell gets goes to them, too."


def _launcher_words(plan: SbatchPlan) -> list[str]:
    """The words before the program, for the shell."""
    if plan.launcher == "mpirun":
        return ["mpirun", f"-np {plan.world_size}", "--bind-to none"]
    # A rank that exits with 75 slightly before the others must not end them. Since Slurm 22.05 a
    # step does not inherit the job's cores per task.
    srun = ["srun", "--kill-on-bad-exit=0"]
    if plan.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={plan.cpus_per_task}")
    return srun


def _program_words(plan: SbatchPlan) -> list[str]:
    """The program, as words for the shell."""
    program = plan.program
    words = list(map(shlex.quote, program.words))
    if program.command == "train":
        words += ["--out", '"$run_dir"']
    if program.command:  # `-m gradsync train` stays on one line
        words[:3] = [" ".join(words[:3])]
    return ['"$python" ' + words[0], *words[1:]] if program.by_python else words


def _afterwards(plan: SbatchPlan) -> list[str]:
    history = shlex.quote(f"{plan.output}/{plan.job_name}-") + _JOB + ".turns.json"
    words = [
        '"$python" -m gradsync.commands.launch.requeue',
        '--status="$status"',
        '--seconds="$SECONDS"',
    ]
    return [*words, f"--history={history}", *(['--run-dir="$run_dir"'] if _run_dir(plan) else [])]


def _lines(words: Sequence[str]) -> str:
    """Words as one command over several lines; a flag and its value stay together."""
    pairs: list[str] = []
    for word in words:
        if pairs and pairs[-1][:2] == "--" and " " not in pairs[-1] and word[:1] != "-":
            pairs[-1] += f" {word}"
        else:
            pairs.append(word)
    lines, line = [], ""
    for word in pairs:
        if line and len(line) + len(word) > 84:
            lines.append(line)
            line = ""
        line += (" " if line else "") + word
    return " \\\n    ".join([*lines, line])
