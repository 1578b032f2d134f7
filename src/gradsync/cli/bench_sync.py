"""`gradsync bench sync`: a training step of every strategy, beside its peers and the ideal."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gradsync.bench.contestant import left_out, parse_contestants, with_ideals
from gradsync.bench.memory_choice import Load, check_fits, fits, largest_that_fits
from gradsync.bench.plot import check_plot
from gradsync.bench.record import check_folder, write_record
from gradsync.bench.sync_duration import in_time, trial_step
from gradsync.bench.sync_plan import (
    DEVICES,
    Plan,
    SyncSettings,
    built_per_turn,
    plan_to_json,
    sync_plan,
)
from gradsync.cli.arguments import parse
from gradsync.cli.ranks import WORKER, be_rank, measure_on_ranks, until_stopped
from gradsync.errors import ConfigError, RunError
from gradsync.models.presets import PRESETS, preset
from gradsync.runtime import environ
from gradsync.runtime.memory_limit import available_bytes
from gradsync.runtime.resolve import resolve
from gradsync.runtime.text_file import write_text
from gradsync.runtime.threads import choose_threads

if TYPE_CHECKING:
    from gradsync.bench.sync_result import Row
    from gradsync.world import World

_COMMAND = ("bench", "sync")
_USUAL_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOptions:
    """Time training steps of a GPT on random tokens: strategies of gradsync, torch DDP, Accelerate
    and Fabric as their users run them, and `none`, which talks to nobody.

    All ranks hold all contestants, which take turns; each one's step is compared with `none` of the
    same round. Before that, each is checked: it must train, and give the losses that it should.
    Started by torchrun, mpirun or srun, it measures these ranks.
    """

    model_size: str = "auto"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b; auto takes the largest that fits into
    memory and takes less than three minutes here, as a few timed steps say (under a launcher, into
    memory)."""
    world_size: int = 2
    """Ranks to start on this host."""
    strategies: str = "default"
    """Names with commas between them, each with options if need be: naive,bucketed:bucket_mb=1.
    Beside the strategies there are torch_ddp, accelerate and fabric; `default` and `all` stand for
    several. none is always there."""
    num_steps: int = 10
    """Optimizer steps of a turn that count."""
    num_warmup: int = 2
    """Optimizer steps of a turn before those."""
    rounds: int = 5
    """Turns of each contestant."""
    context_length: int | None = None
    """Tokens of a sequence; default: what the model takes, at most 512."""
    batch_size: int = 1
    """Sequences per rank and step."""
    leaves_per_rank: int = 1
    """Micro-batches into which these are divided."""
    dtype: str = "bf16"
    """fp32, or bf16 (autocast over fp32 weights)."""
    bucket_mb: float | None = None
    """Size of buckets, of whoever has some; default: each contestant's own. MiB."""
    threads: int | None = None
    """Intra-op threads of a rank; default: cores / ranks."""
    device: str = "auto"
    """auto, cpu or cuda."""
    same_allocator: bool = False
    """All keep freed memory in the process, as gradsync does; default: torch_ddp, accelerate and
    fabric run with the system's own setting, beside a `none` that does so too."""
    seed: int = 0
    """Names tokens and weights."""
    csv: str = ""
    """Write one row per contestant to this file."""
    plot: str = ""
    """Draw a picture: FILE.png, FILE.svg or FILE.pdf."""
    out: str = ""
    """Write record.json, with every sample, into this folder."""
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output; the table goes to standard error."""
    dry_run: bool = False
    """Only say what would be measured."""


def run(argv: list[str]) -> int:
    """Carry out `gradsync bench sync ARGV`.

    Returns:
        0 when all was measured, 1 when a contestant does not train; 128 + signal after one.

    Raises:
        ConfigError: an unknown size, contestant or option, one that does not fit into memory or is
            not installed, numbers that cannot be.
        RunError: ranks could not begin, a contestant does not train, results could not be written.
    """
    if argv[:1] == [WORKER]:
        return be_rank(Path(argv[1]), _measure)
    options = parse(SyncOptions, argv, "bench sync")
    world = resolve(environ.snapshot()).world
    plan = plan_of(options, world)
    if world.is_main:
        check_places(csv=options.csv, plot=options.plot, out=options.out)
    if options.dry_run:
        if world.is_main:
            print(json.dumps(plan_to_json(plan), indent=1))
        return 0
    return until_stopped(world, lambda: _work(options, plan, world))


def plan_of(options: SyncOptions, world: World) -> Plan:
    """What was asked for; under a launcher, at its number of ranks.

    Raises:
        ConfigError: see `run`.
    """
    chosen = parse_contestants(options.strategies)
    world_size = world.world_size if world.is_distributed else options.world_size
    for name in ("world_size", "batch_size", "leaves_per_rank"):
        if getattr(options, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} must be at least 1; got {getattr(options, name)}")
    for each in chosen:
        if options.same_allocator and each.chose_memory and not each.keep_memory:
            raise ConfigError(f"--same-allocator: all keep freed memory, and {each.label} does not")
    # Only ranks of our own can be started twice, once for each setting of the allocator.
    one_set = options.same_allocator or world.is_distributed or uses_cuda(options.device)
    contestants = with_ideals(chosen, same_allocator=one_set)
    local = world.local_world_size if world.is_distributed else world_size
    sets = len({each.keep_memory for each in contestants})
    tokens = options.context_length or _USUAL_TOKENS
    load, room = memory_for(
        options.device,
        leaf_tokens=options.batch_size // options.leaves_per_rank * tokens,
        ranks=local * sets,
        busy_ranks=local,
    )
    settings = SyncSettings(
        model_size=size_of(options.model_size, load, room),
        context_length=options.context_length,
        num_steps=options.num_steps,
        num_warmup=options.num_warmup,
        rounds=options.rounds,
        leaves_per_rank=options.leaves_per_rank,
        dtype=options.dtype,
        bucket_mb=options.bucket_mb,
        threads=choose_threads(local, requested=options.threads),
        device=options.device,
        seed=options.seed,
    )
    plan = sync_plan(settings, contestants, world_size=world_size, batch_size=options.batch_size)
    if options.model_size == "auto" and not world.is_distributed:
        plan = in_time(plan, load.kind, partial(trial_step, ranks_per_host=local))
    most = max(sum(e.worker_set == n for e in plan.entries) for n in range(len(plan.sets)))
    together = replace(load, contestants=most + 1)  # the one under way is there twice
    return plan if fits(plan.settings.config, together, room) else built_per_turn(plan)


def as_measured(options: SyncOptions, world: World) -> SyncOptions:
    """What to ask for to measure the same again, without a launcher."""
    if not world.is_distributed:
        return options
    return replace(options, world_size=world.world_size, same_allocator=True)


def uses_cuda(device: str) -> bool:
    """Whether accelerators will compute; asks torch only when it must.

    Raises:
        ConfigError: no such device, or none here.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device must be one of {', '.join(DEVICES)}; got {device!r}")
    if device == "cpu":
        return False
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no CUDA device here; take cpu or auto")
        return True
    if not Path("/proc/driver/nvidia").exists() and not Path("/dev/kfd").exists():
        return False
    import torch

    return torch.cuda.is_available()


def memory_for(device: str, *, leaf_tokens: int, ranks: int, busy_ranks: int) -> tuple[Load, int]:
    """What has to fit into how many bytes: all ranks into the host, or one into its device.

    Raises:
        ConfigError: see `uses_cuda`.
    """
    if not uses_cuda(device):
        return Load(leaf_tokens=leaf_tokens, ranks=ranks, busy_ranks=busy_ranks), available_bytes()
    import torch

    room = torch.cuda.get_device_properties(0).total_memory
    return Load(leaf_tokens=leaf_tokens, ranks=1, busy_ranks=1, kind="cuda"), room


def size_of(name: str, load: Load, room: int) -> str:
    """The preset to take: the one that was named, or the largest that fits into `room` bytes.

    Raises:
        ConfigError: unknown, or it does not fit.
    """
    if name == "auto":
        name = largest_that_fits(load, room) or "tiny"
    preset(name)
    check_fits(name, load, room)
    return name


def check_places(*, csv: str, plot: str, out: str) -> None:
    """Long before there is something to write.

    Raises:
        ConfigError: a place that cannot be written.
    """
    if out:
        check_folder("--out", Path(out))
    if plot:
        check_plot(Path(plot))
    if csv:
        path = Path(csv)
        if path.is_dir():
            raise ConfigError(f"--csv {path}: is a folder; name a file")
        if not path.parent.is_dir():
            raise ConfigError(f"--csv {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigError(f"--csv {path}: may not be written")


def _measure(plan: dict[str, Any]) -> dict[str, Any]:
    """One rank's part; see `ranks.Measure`."""
    from gradsync.bench.sync_worker import measure

    return measure(plan)


def _work(options: SyncOptions, plan: Plan, world: World) -> int:
    if world.is_main:
        _announce(options, plan, world)
    outcome = measure_on_ranks(
        _COMMAND, plan_to_json(plan), _measure, world=world, world_size=plan.num_ranks
    )
    if outcome.result is None:
        return outcome.code
    from gradsync.bench.sync_result import rows_of

    results = outcome.result["results"]
    _tell(as_measured(options, world), plan, rows_of(plan, results), results)
    return 0


def _announce(options: SyncOptions, plan: Plan, world: World) -> None:
    """What was decided for the user, one line each."""
    for name in left_out(options.strategies):
        print(
            f"gradsync: {name} is left out: its package is not installed "
            "(pip install 'gradsync[bench]')",
            file=sys.stderr,
        )
    others = any(not entry.contestant.is_ours for entry in plan.entries[1:])
    if world.is_distributed and others and not options.same_allocator:
        print(
            f"gradsync: under {world.launcher} there is one set of ranks: all contestants keep "
            "freed memory (as with --same-allocator)",
            file=sys.stderr,
        )
    if options.model_size == "auto":
        name = plan.settings.model_size
        millions = PRESETS[name].num_params() / 1e6
        print(
            f"gradsync: model size {name} ({millions:.0f} M parameters), the largest that fits"
            f"{'' if world.is_distributed else ' and is done in three minutes'}; --model-size "
            "takes another",
            file=sys.stderr,
        )


def _tell(
    options: SyncOptions, plan: Plan, rows: Sequence[Row], results: Sequence[Mapping[str, Any]]
) -> None:
    from gradsync.bench.sync_csv import csv_text
    from gradsync.bench.sync_report import print_report

    environment = results[0]["environment"]
    human = sys.stderr if options.as_json else sys.stdout
    print_report(plan, rows, environment, human)
    command = command_of(options, _COMMAND)
    data = {"plan": plan_to_json(plan), "rows": [row.as_json() for row in rows]}
    if options.as_json:
        document = {"environment": environment, "command": command, **data}
        print(json.dumps(document, indent=1, allow_nan=False), flush=True)
    if options.csv:
        try:
            write_text(Path(options.csv), csv_text(plan, rows))
        except OSError as error:
            raise RunError(f"--csv {options.csv}: {error.strerror}") from error
    if options.plot:
        from gradsync.bench.plot_sync import plot_sync

        plot_sync(Path(options.plot), plan, rows, environment)
    if options.out:
        samples = [result["contestants"] for result in results]
        path = write_record(
            Path(options.out),
            name="sync",
            command=command,
            environment=environment,
            data={**data, "samples": samples},
        )
        print(f"wrote {path}", file=human)


def command_of(options: Any, command: Sequence[str]) -> str:
    """What to type for the same measurement; without the places for its results."""
    words = ["gradsync", *command]
    for entry in fields(options):
        value = getattr(options, entry.name)
        if entry.name in ("csv", "plot", "out", "as_json", "dry_run") or value == entry.default:
            continue
        flag = "--" + entry.name.replace("_", "-")
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
