"""The `gradsync` command: run a sub-command, turn errors into one line and an exit code.

Each command is a module with `run(argv) -> exit code`. It is imported only on use, so
`gradsync --help` works without torch.

Exit codes: 0 done · 1 failed · 2 usage or configuration · 75 stopped cleanly after a signal,
checkpoint written · 124 a rank was late · 130 interrupted twice.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module

from gradsync import __version__
from gradsync.core.files import check_name, one_line, printable
from gradsync.errors import ConfigError, DivergenceError, GradsyncError, PeerError, UsageError
from gradsync.runtime import environ
from gradsync.runtime.signals import SAID_BY_ANOTHER

COMMANDS = {
    "train": ("cli.train", "train a GPT on 1..N ranks, from any launcher"),
    "prepare": ("prepare.command", "turn files, folders or JSONL into train.bin and val.bin"),
    "sample": ("train.sample", "generate text from a checkpoint"),
    "export": ("train.export", "write a trained model for transformers, or read another program's"),
    "report": ("report.command", "write a page about a run: curves, times, settings"),
    "watch": ("report.watch", "follow a run that is going on, in the terminal"),
    "verify": (
        "verify.command",
        "prove every strategy right against one rank, or say why it is not",
    ),
    "bench": (
        "bench.experiment",
        "measure strategies and collectives beside their limits and their peers",
    ),
    "drill": ("cli.drill", "break one rank on purpose: who is named, when, and what is lost"),
    "tune": (
        "bench.tune",
        "measure which way to synchronise is fastest here, for train --sync auto",
    ),
    "plan": ("cli.plan", "say which strategy, batch and split fit a machine, here or anywhere"),
    "lint": ("lint.command", "find known mistakes in a training script, without running it"),
    "launch": (
        "launch.command",
        "start ranks on this host, or say what to start on each of several",
    ),
    "submit": ("launch.submit", "write, check and submit a Slurm job"),
    "doctor": ("cli.doctor", "say whether this machine is ready, and what gradsync sees"),
}
"""Each command's module, and what it does."""
_SILENCE_S = 2.0

_BAD_PATH = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP)
"""Errors that a path given by the user causes, wherever it is first used."""

_HELP = """\
usage: gradsync COMMAND [options]

Data-parallel training for PyTorch: the same script on 1..N ranks.

commands:
{commands}

`gradsync COMMAND --help` says more; `gradsync doctor` says what this machine has.

example:
  gradsync train tiny --nproc-per-node 2     # a small GPT on two ranks of this machine
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own); returns the exit code."""
    try:
        code = _main(argv)
    except BrokenPipeError:
        code = 1
    try:
        sys.stdout.flush()
    except OSError:
        # The reader of our output is closed (`| head`, a terminal). Python would flush again at
        # exit, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    handler = logging.StreamHandler()
    handler.setFormatter(_PrintableFormatter("gradsync: %(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:<{width}}  {summary}" for name, (_, summary) in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(lines)), end="")
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"gradsync {__version__}")
        return 0
    return _run_command(arguments[0], arguments[1:])


def _run_command(name: str, arguments: list[str]) -> int:
    try:
        check_name("command", name, COMMANDS)
        module, _ = COMMANDS[name]
        return import_module(f"gradsync.commands.{module}").run(arguments)
    except GradsyncError as error:
        return _fail(error)
    except OSError as error:
        if error.errno not in _BAD_PATH or not isinstance(error.filename, str):
            raise
        path = one_line(error.filename)
        return _fail(UsageError(f"cannot use {path}: {error.strerror}; name another path"))
    except KeyboardInterrupt:
        print("gradsync: error: interrupted", file=sys.stderr, flush=True)
        return 130


def _fail(error: GradsyncError) -> int:
    """Print an error once: rank 0 one that all ranks found alike, a rank its own traceback."""
    rank = _rank()
    alike = isinstance(error, ConfigError | DivergenceError)
    if (rank and alike) or (not alike and hasattr(error, SAID_BY_ANOTHER)):
        # Launchers end all ranks when the first one fails: give rank 0 time to print.
        time.sleep(_SILENCE_S)
        return error.exit_code
    message = str(error)
    if rank and isinstance(error, PeerError):
        message = message.partition("\n")[0]
    who = f"[rank {rank}] " if rank else ""
    print(f"gradsync: error: {who}{printable(message)}", file=sys.stderr, flush=True)
    return error.exit_code


class _PrintableFormatter(logging.Formatter):
    """Formats log records without terminal control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def _rank() -> int:
    """Rank for error lines only; 0 if the environment is invalid."""
    from gradsync.runtime.resolve import resolve

    try:
        return resolve(environ.snapshot()).world.rank
    except GradsyncError:
        return 0
