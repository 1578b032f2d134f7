"""Text of a job script from a `SbatchPlan`. Pure.

[Note: how the signal travels]
The ranks must hear Slurm's warning, whatever started them.
- srun: ranks are tasks of a step, and steps are signalled unless `--signal=B:` says otherwise.
- torchrun: its agents are the tasks. Under proctrack/cgroup nobody else is signalled, under
  proctrack/linuxproc the ranks are, too. So the agents pass the signal on (by default USR1 ends
  them), and wait for the checkpoint; ranks do not mind hearing it twice.
- mpirun: runs in the batch shell, and its daemons on other nodes are a step that must not be hit.
  So only the shell gets the signal (`B:`), and passes it on to mpirun, which hands it to all ranks.
In every script the shell passes on what it gets, as USR1: `scancel --batch`, `--full`, or a SIGTERM
before preemption. mpirun would end its ranks at a SIGTERM within a second.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib import resources

from gradsync.launch.sbatch_plan import TASK, SbatchPlan

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_JOB = '"$SLURM_JOB_ID"'
_ARRAY_JOB = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
_KILL_GRACE_S = 10
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


def sbatch_script(plan: SbatchPlan) -> str:
    """The job script for `plan`: readable, and what `sbatch` takes.

    Names, paths and arguments are data: each goes through `shell_word`, or, in a directive, through
    `directive_value`. Only `plan.setup` is shell.
    """
    from jinja2 import Environment, StrictUndefined

    source = resources.files("gradsync.launch").joinpath("job.sbatch.j2").read_text("utf-8")
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    return environment.from_string(source).render(
        headline=_headline(plan),
        directives=_directives(plan),
        modules=[shell_word(module) for module in plan.modules],
        setup=plan.setup,
        python=shell_word(plan.python),
        run_dir=_run_dir(plan),
        launcher=plan.launcher,
        nodes=plan.nodes,
        signal_note=_signal_note(plan),
        command=_lines([*_launcher_words(plan), *_program_words(plan)]),
        afterwards=_lines(_afterwards(plan)),
    )


def shell_word(text: str, *, array: bool = False, torchrun: bool = False) -> str:
    """`text` as one word of a shell, whatever is in it.

    Args:
        array: `{task}` in it stands for the number of the array's task.
        torchrun: its agent substitutes ${…} in arguments; a doubled dollar sign comes out as one.
    """
    text = text.replace("$", "$$") if torchrun else text
    if not array or TASK not in text:
        return shlex.quote(text)
    parts = [shlex.quote(part) if part else "" for part in text.split(TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(parts)


def directive_value(text: str) -> str:
    """`text` as the value of a `#SBATCH` option: as it is, or in double quotes."""
    return text if _PLAIN.fullmatch(text) else '"' + text.replace('"', '\\"') + '"'


def _headline(plan: SbatchPlan) -> str:
    each = f"{plan.ranks_per_node} rank(s)"
    if plan.gpus_per_node:
        each += ", one a GPU"
    array = f", for each task of {plan.array}" if plan.array else ""
    return f"{plan.name}: {plan.nodes} node(s) with {each}, started by {plan.launcher}{array}."


def _directives(plan: SbatchPlan) -> list[str]:
    only_shell = "B:" if plan.launcher == "mpirun" else ""
    numbers = "%A_%a" if plan.array else "%j"
    log = f"{plan.folder.replace('%', '%%')}/%x-{numbers}.out"
    options: list[tuple[str, object]] = [
        ("job-name", plan.name),
        ("nodes", plan.nodes),
        ("ntasks-per-node", plan.tasks_per_node),
        ("cpus-per-task", plan.cpus_per_task),
        ("gres", f"gpu:{plan.gpus_per_node}" if plan.gpus_per_node else None),
        ("mem", plan.memory),
        ("time", plan.time),
        ("partition", plan.partition),
        ("account", plan.account),
        ("qos", plan.qos),
        ("array", plan.array),
        ("signal", f"{only_shell}USR1@{plan.warn_s}"),
        ("open-mode", "append"),
        ("output", log),
    ]
    given = [
        f"--{name}={directive_value(str(value))}" for name, value in options if value or value == 0
    ]
    return [*given, "--requeue", *map(_free_directive, plan.directives)]


def _free_directive(directive: str) -> str:
    name, equals, value = directive.partition("=")
    return f"{name}={directive_value(value)}" if equals and value else directive


def _run_dir(plan: SbatchPlan) -> str:
    if plan.run_dir:
        return shell_word(plan.run_dir, array=bool(plan.array))
    if plan.program.command != "train":
        return ""
    return shlex.quote(f"runs/{plan.name}-") + _job_id(plan)


def _job_id(plan: SbatchPlan) -> str:
    return _ARRAY_JOB if plan.array else _JOB


def _signal_note(plan: SbatchPlan) -> str:
    if plan.launcher == "mpirun":
        return "Slurm's warning comes to this shell alone; mpirun hands USR1 to all ranks."
    if plan.launcher == "torchrun":
        return "Slurm warns torchrun's agents, which tell their ranks. What comes here goes there."
    return "Slurm warns the ranks themselves. What this shell gets goes to them, too."


def _launcher_words(plan: SbatchPlan) -> list[str]:
    """Up to the program, as words for the shell."""
    if plan.launcher == "mpirun":
        return ["mpirun", f"-np {plan.world_size}", "--bind-to none"]
    # A rank that leaves with 75 a moment before the others must not end them. And since Slurm 22.05
    # a step does not inherit the job's cores per task.
    srun = ["srun", "--kill-on-bad-exit=0"]
    if plan.cpus_per_task is not None:
        srun.append(f"--cpus-per-task={plan.cpus_per_task}")
    if plan.launcher == "srun":
        return srun
    meeting = ["--standalone"]
    if plan.nodes > 1:
        meeting = [
            "--rdzv-backend=c10d",
            '--rdzv-endpoint="$endpoint"',
            '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
        ]
    return [
        *srun,
        '"$python" -m torch.distributed.run',
        f"--nnodes={plan.nodes}",
        f"--nproc-per-node={plan.ranks_per_node}",
        *meeting,
        f"--signals-to-handle={_SIGNALS}",
        f"--shutdown-timeout={max(plan.warn_s - _KILL_GRACE_S, 1)}",
    ]


def _program_words(plan: SbatchPlan) -> list[str]:
    """The program, as words for the shell."""
    program, array = plan.program, bool(plan.array)
    by_torchrun = plan.launcher == "torchrun"
    words = [shell_word(word, array=array, torchrun=by_torchrun) for word in program.words]
    if program.command == "train":
        doubled = by_torchrun and "$" in plan.run_dir
        words += ["--out", r'"${run_dir//\$/\$\$}"' if doubled else '"$run_dir"']
    if program.command:  # `-m gradsync train` belongs together
        words[:3] = [" ".join(words[:3])]
    if not by_torchrun:
        return ['"$python" ' + words[0], *words[1:]] if program.by_python else words
    if program.by_python and (program.words[0] == "-m" or program.words[0][:1] != "-"):
        return words  # torchrun takes -m and scripts itself
    return ["--no-python", *(['"$python"'] if program.by_python else []), *words]


def _afterwards(plan: SbatchPlan) -> list[str]:
    history = shlex.quote(f"{plan.folder}/{plan.name}-") + _job_id(plan) + ".turns.json"
    words = ['"$python" -m gradsync.launch.requeue', '--status="$status"', '--seconds="$SECONDS"']
    words += [f"--history={history}", f"--fruitless-turns={plan.fruitless_turns}"]
    return [*words, *(['--run-dir="$run_dir"'] if _run_dir(plan) else [])]


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
