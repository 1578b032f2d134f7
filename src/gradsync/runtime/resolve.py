"""Find the launcher that started this process: parse every family, the first complete row wins.

The other rows must be explained: a row may be an *outer layer* (Slurm around mpirun, anything
around torchrun), or give the same place in other variables. Anything else is a contradiction.
Guessing would give N processes that all believe to be rank 0, or ranks that wait forever, so it is
an error that shows the whole table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradsync.errors import LaunchError
from gradsync.runtime.launchers import PARSERS, Reading, integer
from gradsync.world import World

_MANAGERS = ("flux", "srun")
_IGNORED = ("NUM_GPUS", "NPROC_PER_NODE")
"""Rank counts that other projects' scripts read."""
_RESTART_COUNTS = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """This process's place among the ranks, and its source."""

    world: World  # the place of this process among all ranks
    reading: Reading  # the row that won
    readings: tuple[Reading, ...]  # all rows, in order of precedence
    reasons: tuple[str, ...]  # why each of `readings` won or did not
    warnings: tuple[str, ...] = ()  # lines that the main process prints once
    generation: str = "0"
    """Restart count of the job; separates a dead run's processes from ours."""

    def explain(self) -> str:
        """The table of rows, one line each: name, values, why it won or not."""
        return _table(self.readings, self.reasons)


def resolve(env: Mapping[str, str]) -> Resolution:
    """Find this process's place from launcher variables.

    Raises:
        LaunchError: a variable is not a number, a family is partly set, or families contradict each
            other; the message shows each family's values.
    """
    readings = tuple(parser(env) for parser in PARSERS)
    winner = next((reading for reading in readings if reading.world is not None), None)
    if winner is None:
        for reading in readings:
            if reading.missing:
                raise LaunchError(
                    f"launcher variables are partly set: {reading.says()}. Set the missing ones, "
                    "or unset all of them to run one rank. What each launcher family says:\n"
                    f"{_table(readings)}"
                )
        winner = Reading(name="python", world=World())
    reasons = []
    for reading in readings:
        reason = _judge(reading, winner, readings)
        if reason is None:
            raise _contradiction(reading, winner, readings)
        reasons.append(reason)
    if winner.name == "python":
        readings = (*readings, winner)
        reasons.append("no launcher: one rank")
    assert winner.world is not None
    counts = [name for name in _RESTART_COUNTS if env.get(name, "").strip()]
    return Resolution(
        world=winner.world,
        reading=winner,
        readings=readings,
        reasons=tuple(reasons),
        warnings=_warnings(env, winner),
        generation=str(integer(env, counts[0])) if counts else "0",
    )


def _table(readings: tuple[Reading, ...], reasons: tuple[str, ...] = ()) -> str:
    """The rows as aligned text; `reasons`, if given, holds one for each row."""
    said = [reading.says() for reading in readings]
    names = max(len(reading.name) for reading in readings)
    width = max(map(len, said))
    rows = zip(readings, said, reasons or ("",) * len(readings), strict=True)
    return "\n".join(
        f"  {reading.name:<{names}}  {text:<{width}}  {reason}".rstrip()
        for reading, text, reason in rows
    )


def _judge(reading: Reading, winner: Reading, readings: tuple[Reading, ...]) -> str | None:
    """Why `reading` won or not; None if it contradicts the winner."""
    mine, theirs = winner.world, reading.world
    assert mine is not None
    if reading is winner:
        return "won: the first complete row"
    if reading.world is None and not reading.missing:
        return ""
    if winner.name == "torchrun":
        return "outer layer of torchrun"
    mpi = [
        row.name
        for row in readings
        if row.world is not None and row.name not in ("env", *_MANAGERS)
    ]
    # Wrappers that bind devices export the local rank as torchrun's variable.
    known = {"LOCAL_RANK": str(mine.local_rank), "LOCAL_WORLD_SIZE": str(mine.local_world_size)}
    reason: str | None = None
    if theirs is None:
        if reading.name in _MANAGERS:
            reason = "partly set, not needed"
        elif reading.name == "env" and dict(reading.seen).items() <= known.items():
            reason = "says the same, partly set"
    elif (theirs.rank, theirs.world_size) == (mine.rank, mine.world_size):
        reason = f"says the same as {winner.name}"
    elif reading.name in _MANAGERS and mpi:
        # mpirun's daemons are tasks of a separate Slurm step: its numbers mean nothing here.
        reason = f"outer layer of {mpi[0]}"
    elif winner.name == "env":
        # Each of their ranks may have started an equal block of consecutive ranks.
        block, left = divmod(mine.world_size, theirs.world_size)
        if block > 1 and not left and mine.rank // block == theirs.rank:
            reason = "outer layer of the ranks set by hand"
    return reason


def _contradiction(reading: Reading, winner: Reading, readings: tuple[Reading, ...]) -> LaunchError:
    names = " ".join(f"-u {name}" for name, _ in (winner if winner.name == "env" else reading).seen)
    return LaunchError(
        f"launcher variables contradict each other: {winner.name} says {winner.says()}, "
        f"{reading.name} says {reading.says()}. Unset the ones that are left over (for example "
        f"`env {names} gradsync …`). What each launcher family says:\n{_table(readings)}"
    )


def _warnings(env: Mapping[str, str], winner: Reading) -> tuple[str, ...]:
    if winner.name != "python":
        return ()
    found = []
    tasks = (env.get("SLURM_NTASKS", "").strip() or env.get("SLURM_NPROCS", "").strip())[:6]
    if tasks not in ("", "1"):
        found.append(
            f"this Slurm job has {tasks} tasks, but this process was not started by srun: "
            f"running as one rank. Put `srun` before the command to use all {tasks}"
        )
    for name in _IGNORED:
        wanted = env.get(name, "").strip()[:6]
        if wanted.isdecimal() and int(wanted) > 1:
            found.append(
                f"{name}={wanted} is not read: running as one rank. `gradsync train "
                f"--nproc-per-node {wanted} …` starts as many, and so do torchrun and mpirun"
            )
    return tuple(found)
