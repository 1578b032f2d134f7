"""`gradsync plan`: find the strategy, split and micro-batch that fit this or another machine."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from gradsync.commands.arguments import check_least, flag_of, names_in, numbers_in, parse
from gradsync.commands.plan.choice import USUAL, Costs, Recommendation, Search, choose, remedy
from gradsync.commands.plan.description import NETWORKS, Hardware, fast_switches
from gradsync.commands.plan.hardware_file import hardware_document, load_hardware
from gradsync.commands.plan.machine import detect_hardware
from gradsync.commands.plan.report import (
    commands,
    console_of,
    efficiency_table,
    figure_lines,
    hardware_lines,
    interval_line,
    link_text,
    pick_sections,
    print_table,
    section,
    work_line,
)
from gradsync.commands.plan.step_costs import simulate
from gradsync.commands.plan.workload import Split, Workload
from gradsync.commands.train.config import AUTO, recipe
from gradsync.commands.train.data import vocabulary
from gradsync.core.files import check_name
from gradsync.errors import ConfigError, RunError
from gradsync.runtime import environ
from gradsync.runtime.bounds import MOST_NODES
from gradsync.sync.registry import STRATEGIES, find_strategy

_SIZES = ("tokens_per_update", "seq_len", "dtype", "micro_batch_size")
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_SIMULATED = (
    *("bucketed", "ring", "hierarchical", "invariant", "fsdp"),
    *("powersgd", "local_sgd", "diloco"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """Choose a strategy, split and micro-batch for training a model, and predict memory and time.

    Every combination is checked against the memory of the devices. Its time comes from a model: of
    this machine after a short probe, of others from data sheets. The global batch always stays the
    same. Sizes default to those of `gradsync train MODEL`.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = "tiny"
    """tiny, mini, small, medium, large, xl, 1.3b, 2.7b."""
    hardware: str = ""
    """Plan for other hardware: a name such as h100x4 or a100-40x2, or FILE.yaml."""
    nodes: int | None = None
    """Number of hosts like this one; default: one, or the launcher's number."""
    nproc_per_node: int | None = None  # CPU: ranks per host; default: depends on its cores.
    network: str = ""
    """Between hosts, such as infiniband-ndr or ethernet-10g; others in the file of --hardware."""
    tokens_per_update: int | None = None
    """Tokens of one optimizer step over all ranks; default: the model's."""
    micro_batch_size: int | None = None
    """Sequences of one forward and backward; default: several are tried."""
    seq_len: int | None = None  # Tokens of a sequence; default: the model's.
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """bf16 and fp16 are autocast over fp32 weights; default: that of `gradsync train` there."""
    data: str = ""
    """Directory with train.bin, for its vocabulary; default: the model's own."""
    strategies: str = ""
    """Names separated by commas, or all; default: all that keep one rank's numbers."""
    probe: bool = True  # Measure a few micro-batches here; --no-probe estimates.
    mtbf_hours: float = 0.0  # Hours between faults of the whole run: how often to save then.
    save_s: float = 0.1  # Seconds for which a checkpoint stops training, as in a summary.json.
    simulate: str = ""  # Also simulate the step on these numbers of devices: 8,64,512.
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False
    """Print one JSON document on standard output, and nothing else there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The request, checked."""

    hardware: Hardware
    work: Workload
    search: Search
    flags: tuple[str, ...]  # For `gradsync train`, for values that differ from the model's


def run(argv: list[str]) -> int:
    """Run `gradsync plan ARGV`.

    Raises:
        ConfigError: an unknown model, strategy or network, an invalid file or number.
        DataError: the data's description cannot be read.
        RunError: the model fits nowhere; raised after the table.
    """
    options = parse(PlanOptions, argv, "plan")
    if not (0 <= options.mtbf_hours < math.inf and 0 < options.save_s < math.inf):
        raise ConfigError("--mtbf-hours must be a number from 0, --save-s one above 0")
    request = request_of(options)
    costs, work, hardware = Costs(), request.work, request.hardware
    choice = choose(work, hardware, costs, request.search)
    may_probe = options.probe and not options.hardware and choice.pick is not None
    if may_probe and costs.measure(work, hardware):
        choice = choose(work, hardware, costs, request.search)
    _tell(options, request, costs, choice)
    return 0


def request_of(options: PlanOptions) -> Request:
    """The request, checked; raises as `run`."""
    usual, hardware = recipe(options.model), hardware_of(options)
    given = {n: value for n in _SIZES if (value := getattr(options, n)) is not None}
    config = replace(usual, **given)
    if config.dtype == AUTO:
        config = replace(config, dtype=fast_switches(hardware)[0])
    more_sizes = []
    if options.micro_batch_size is None:  # one that divides the batch, and others to try
        sequences = config.tokens_per_update // config.sequence_length
        fitting = math.gcd(sequences, config.micro_batch_size) or 1
        config = replace(config, micro_batch_size=fitting)
        more_sizes = [size for size in _MICRO_BATCHES if sequences % size == 0]
    plan, model = config.batch_plan(1), config.model
    if options.data:
        if not Path(options.data).is_dir():
            raise ConfigError(f"--data {options.data} is no directory")
        model = replace(model, vocab_size=vocabulary(options.data) or model.vocab_size)
    strategies = _strategies(options.strategies)
    if not options.strategies and len(hardware.hosts) > 1 and len(hardware.hosts[0].devices) > 1:
        strategies += ("hierarchical",)
    flags = ["--data", options.data] if options.data else []
    for name, value in given.items():
        if name != "micro_batch_size" and value != getattr(usual, name):
            flags += [flag_of(name), str(value)]
    return Request(
        hardware=hardware,
        work=Workload(
            model=model,
            micro_batch_size=plan.micro_batch_size,
            seq_len=config.sequence_length,
            num_leaves=plan.num_micro_batches,
            dtype=config.named_dtype,
            kind=hardware.devices[0].kind,
        ),
        search=Search(
            strategies=strategies,
            micro_batch_sizes=tuple(dict.fromkeys((config.micro_batch_size, *more_sizes))),
        ),
        flags=tuple(flags),
    )


def hardware_of(options: PlanOptions) -> Hardware:
    """The hardware to plan for: described, or this machine."""
    check_least(options, nodes=1, nproc_per_node=1)
    if options.hardware:
        if options.nodes is not None or options.nproc_per_node is not None:
            raise ConfigError(
                "--nodes and --nproc-per-node are for this machine; --hardware says how many: "
                "h100x8@2 is two hosts"
            )
        hardware = load_hardware(options.hardware)
    else:
        asked = {"num_hosts": options.nodes, "ranks_per_host": options.nproc_per_node}
        hardware = detect_hardware(environ.snapshot(), **asked)
    if not options.network:
        return hardware
    check_name("network", options.network, NETWORKS)
    return replace(hardware, network=NETWORKS[options.network])


def _strategies(text: str) -> tuple[str, ...]:
    if text.strip() == "all":
        return tuple(dict.fromkeys((*USUAL, *STRATEGIES)))
    names = names_in(text) or USUAL
    return tuple(dict.fromkeys(find_strategy(name).name for name in names))


def _simulated(
    options: PlanOptions, request: Request, costs: Costs, choice: Recommendation
) -> list[dict[str, Any]]:
    """More of the first host: every replica keeps the micro-batches that it has under the pick."""
    sizes, pick = numbers_in("--simulate", options.simulate, MOST_NODES), choice.pick
    if not sizes or pick is None:
        return []
    hardware = request.hardware
    names = _strategies(options.strategies) if options.strategies else _SIMULATED
    splits = [Split(strategy=name) for name in names]
    if (best := replace(pick.split, layout=replace(pick.split.layout, dp=1))) not in splits:
        splits.insert(0, replace(best, shared_weights=False))
    work = replace(pick.work, num_leaves=-(-pick.work.num_leaves // pick.split.layout.dp))
    profile = costs.profile(work, hardware.devices[0])
    return simulate(work, hardware, sizes, list(dict.fromkeys(splits)), profile)


def _tell(options: PlanOptions, request: Request, costs: Costs, choice: Recommendation) -> None:
    """Print it; raises RunError if nothing fits."""
    name, pick, hardware = options.model, choice.pick, request.hardware
    simulation = _simulated(options, request, costs, choice)
    lines = [] if pick is None else commands(pick, hardware, name, request.flags)
    figures = figure_lines(costs, hardware)
    if options.as_json:
        document = {
            "model": name,
            "hardware": hardware_document(hardware),
            "pick": None if pick is None else pick.to_json(),
            "candidates": [candidate.to_json() for candidate in choice.candidates],
            "commands": [line for _, line in lines],
            "figures": figures,
            "simulation": simulation or None,
        }
        print(json.dumps(document, indent=1, allow_nan=False), flush=True)
    else:
        print(section("model", [work_line(name, request.work)]))
        print(section("hardware", hardware_lines(hardware)))
        print_table(choice, sys.stdout)
        if pick is not None:
            print("\n".join(pick_sections(pick, lines)))
            print(section("switches", [fast_switches(hardware)[1]]))
            if mtbf_s := 3600 * options.mtbf_hours:
                print(section("save", [interval_line(pick.seconds, options.save_s, mtbf_s)]))
            print(section("figures", figures))
        if simulation:
            network = hardware.network
            print()
            console_of(sys.stdout).print(efficiency_table(simulation))
            if network is not None:
                print(f"between hosts: {link_text(network)}")
    if pick is None:
        raise RunError(remedy(name, choice, hardware))
