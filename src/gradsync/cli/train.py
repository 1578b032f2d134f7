"""`gradsync train`: as one rank of a launcher, as N ranks it starts itself, or alone."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.resolve import resolve
from gradsync.train.config import TrainConfig
from gradsync.train.config_io import parse_config
from gradsync.world import World

SUMMARY = "train a GPT on 1..N ranks, from any launcher"


def run(argv: list[str]) -> int:
    """See `gradsync train --help`. `--json` prints the summary, `--dry-run` only the plan."""
    as_json, dry_run = "--json" in argv, "--dry-run" in argv
    flags = [flag for flag in argv if flag not in ("--json", "--dry-run")]
    config = parse_config(flags)
    world = resolve(environ.snapshot()).world
    if dry_run:
        return _show_plan(config, world)
    if config.nproc_per_node not in (None, world.world_size):
        if world.launcher != "python":
            raise ConfigError(
                f"--nproc-per-node {config.nproc_per_node}, but {world.launcher} has started "
                f"{world.world_size} rank(s) already; drop the flag, or start with python"
            )
        return _start_ranks(config, flags, as_json)
    # Torch's own warnings about its sockets repeat, with stacks, what we say in a line.
    quiet = {"TORCH_CPP_LOG_LEVEL": environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    with environ.exported(quiet):
        return _join_run(config, as_json)


def _start_ranks(config: TrainConfig, flags: list[str], as_json: bool) -> int:
    """Check what can be checked once, then start the ranks on this host."""
    from gradsync.data.plan import solve_batch_plan
    from gradsync.launch.local import launch_local
    from gradsync.train.run_dir import default_out

    assert config.nproc_per_node is not None
    solve_batch_plan(
        tokens_per_update=config.tokens_per_update,
        seq_len=config.sequence_length,
        micro_batch_size=config.micro_batch_size,
        world_size=config.nproc_per_node,
    )
    if not config.out:
        flags = [*flags, "--out", default_out(config)]
    return launch_local(
        ["train", *flags, *(["--json"] if as_json else [])],
        config.nproc_per_node,
        log_dir=None,
    )


def _join_run(config: TrainConfig, as_json: bool) -> int:
    """Be one rank of the run."""
    from gradsync.comm.choose import communicator
    from gradsync.comm.values import broadcast_json
    from gradsync.runtime.session import Session, SessionOptions
    from gradsync.train.run import train, write_exit
    from gradsync.train.run_dir import default_out

    options = SessionOptions(
        device=config.device,
        timeout_s=config.timeout_s,
        rendezvous_timeout_s=config.rendezvous_timeout_s,
        threads=config.threads,
    )
    session = Session(options)
    with session as world:
        if not config.out:
            out = broadcast_json(communicator(world), default_out(config))
            config = replace(config, out=out)
        outcome = train(
            config,
            world,
            threads=session.threads,
            stream=sys.stderr if as_json else sys.stdout,
        )
    if world.is_main:
        write_exit(config, outcome)
        if as_json:
            print(json.dumps(outcome.summary, indent=2))
    return outcome.exit_code


def _show_plan(config: TrainConfig, world: World) -> int:
    """The resolved configuration and batch arithmetic; nothing is started or written."""
    from dataclasses import asdict

    import yaml

    from gradsync.data.plan import solve_batch_plan

    plan = solve_batch_plan(
        tokens_per_update=config.tokens_per_update,
        seq_len=config.sequence_length,
        micro_batch_size=config.micro_batch_size,
        world_size=config.nproc_per_node or world.world_size,
    )
    print(yaml.safe_dump(asdict(config), sort_keys=False), end="")
    print(plan.describe())
    return 0
