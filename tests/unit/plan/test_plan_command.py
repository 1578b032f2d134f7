"""`gradsync plan`: sensible answers for machines that are not here, one line for bad requests."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import plan_output
import pytest
import tyro

from gradsync.commands.cli.main import main
from gradsync.commands.cli.plan import PlanOptions, request_of
from gradsync.commands.models.config import preset
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.choice import (
    MARGIN,
    Candidate,
    Costs,
    Recommendation,
    choose,
    obstacle,
    splits,
)
from gradsync.commands.plan.description import Hardware, Host, Link
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.commands.plan.memory import memory_need
from gradsync.commands.plan.profile import StepProfile, estimate_profile
from gradsync.commands.plan.report import print_table
from gradsync.commands.plan.workload import Split, Workload, goes_with_parts
from gradsync.commands.train.check import check_layout
from gradsync.commands.train.config import recipe
from gradsync.errors import ConfigError
from gradsync.sync.registry import STRATEGIES
from support.launchers import run_python

ROOT = Path(__file__).parents[3]
GB = 10**9
CPU_BOX = """
hosts:
- devices: [{name: a CPU, kind: cpu, memory: 12GB, flops: 150GFLOP/s, count: 2}]
  link: {name: shared memory, latency: 26us, bandwidth: 13.4GB/s}
  cores: 2
  memory: 24GB
"""


REPLICATED = "invariant,bucketed"
"""Fewer candidates than the default's, where a test asks many machines."""


Ask = Callable[..., Any]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs `gradsync plan LINE` beside box.yaml, with an exit code: what it prints; of --json the
    document; of a failure its message."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "box.yaml").write_text(CPU_BOX)
    (tmp_path / "bad.yaml").write_text("hosts: {")

    def ask(line: str, code: int = 0) -> Any:
        found = main(["plan", *shlex.split(line)])
        captured = capsys.readouterr()
        assert found == code
        if "--json" in line:
            return json.loads(captured.out)
        assert code != 2 or captured.out == ""
        return captured.err if code else captured.out

    return ask


@cache
def planned(model: str, hardware: str, **options: Any) -> Recommendation:
    request = request_of(PlanOptions(model=model, hardware=hardware, **options))
    return choose(request.work, request.hardware, Costs(), request.search)


def picked(model: str, hardware: str, **options: Any) -> Candidate:
    """The pick, whose memory is the memory model's, and within what the device has."""
    pick = planned(model, hardware, **options).pick
    assert pick is not None
    assert pick.memory == memory_need(pick.work, pick.split)
    assert pick.memory.total <= pick.room_bytes
    return pick


@pytest.mark.parametrize(
    ("hardware", "layout"),
    [
        *((f"h100x{count}", ParallelLayout(dp=count)) for count in (1, 2, 3, 4)),
        ("a100-80x2", ParallelLayout(dp=2)),  # 80 GB are no 40 GB, whatever the name
        ("a100-40x2", ParallelLayout(tp=2)),
        ("a100-40x3", ParallelLayout(pp=3)),
        ("a100-40x4", ParallelLayout(dp=2, tp=2)),
    ],
)
def test_published_table(hardware: str, layout: ParallelLayout) -> None:
    """The document's "DDP Strategy Selection" for 1 to 4 GPUs, with a model whose replica fits on
    80 GB and not on 40 GB (2.65 G parameters, of 16 bytes each): replicas; else split, and
    replicas of that. The guide's table says the same."""
    assert picked("2.7b", hardware, strategies=REPLICATED).split.layout == layout
    page = (ROOT / "docs" / "guide" / "planning.md").read_text()
    if hardware.startswith("a100-40x"):
        assert f"`{str(Split(strategy='', layout=layout)).strip()}` |" in page
        assert planned("2.7b", hardware).pick.split.layout == layout


@pytest.mark.parametrize(("device", "usual"), [("a100-40", False), ("h200", True)])
def test_xl_is_replicated(device: str, usual: bool) -> None:
    """1.56 G parameters: 25 GB of weights, gradients and AdamW's state. With room for all of the
    recipe, one rank's bits and its micro-batch; else a smaller one."""
    one, four = (picked("xl", f"{device}x{count}", strategies=REPLICATED) for count in (1, 4))
    assert four.split.layout == ParallelLayout(dp=4)
    assert not four.work.activation_checkpointing
    assert four.work.step_tokens == recipe("xl").tokens_per_update
    assert one.seconds / four.seconds == pytest.approx(4, rel=0.05)
    assert (four.work.micro_batch_size == recipe("xl").micro_batch_size) == usual
    assert (four.promise == "bitwise") >= usual


def test_small_on_a_cpu_box(tmp_path: Path) -> None:
    """Two ranks that share one copy of the weights; a leaf smaller than the recipe's."""
    (tmp_path / "box.yaml").write_text(CPU_BOX)
    pick = picked("small", str(tmp_path / "box.yaml"))
    assert pick.split == Split(
        strategy="invariant", layout=ParallelLayout(dp=2), shared_weights=True
    )
    assert pick.memory is not None
    assert 4 * GB < pick.memory.total < 12 * GB * (1 - MARGIN)
    assert pick.memory.weights < 4 * preset("small").num_params()  # a share of one copy


@pytest.mark.parametrize(
    ("network", "ranks"), [("infiniband-ndr", 4), ("{latency: 100ms, bandwidth: 100Mbit/s}", 2)]
)
def test_hosts_are_joined_where_the_network_allows(
    network: str, ranks: int, tmp_path: Path
) -> None:
    (file := tmp_path / "two.yaml").write_text(
        f"hosts: [{{devices: h100x2, count: 2}}]\nnetwork: {network}"
    )
    choice = planned("small", str(file), strategies="invariant")
    assert choice.pick is not None
    assert choice.pick.split.world_size == ranks


def test_answers_without_torch() -> None:
    """Help, and a plan for a described machine."""
    code = (
        "import sys; from gradsync.commands.cli.main import main\n"
        "assert main(['plan', 'mini', '--hardware', 't4']) == 0\n"
        "try: main(['plan', '--help'])\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    assert "margin stays free" in run_python(["-c", code]).ok().stdout


@pytest.mark.parametrize("line", ["2.7b --hardware a100-40x2", "mini --hardware t4x2"])
def test_the_command_is_one_that_train_takes(
    line: str, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    document = ask(f"{line} --json")
    (command,) = document["commands"]
    program, *arguments = shlex.split(command)
    assert program == "gradsync"
    assert main([*arguments, "--dry-run", "--json"]) == 0
    config = json.loads(capsys.readouterr().out)["config"]
    assert config["sync"] == document["pick"]["strategy"]
    assert config["micro_batch_size"] == document["pick"]["micro_batch_size"]


def test_commands_for_several_hosts(ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    few = "--strategies invariant --micro-batch-size 4"
    for line in ask(f"small --hardware h100x4@2 --json {few}")["commands"]:
        _, command, *arguments = shlex.split(line)
        dry = ["--dry-run"] if command == "submit" else []
        assert main([command, *dry, *arguments]) == 0
    assert "#SBATCH --gres=gpu:4" in capsys.readouterr().out


def test_all_strategies() -> None:
    choice = planned("small", "h100x2", strategies="all", micro_batch_size=4)
    assert choice.pick is not None
    assert {each.split.strategy for each in choice.candidates} == set(STRATEGIES)
    assert choice.search.strategies[0] == "invariant"  # what is usual comes first
    few = planned("small", "h100x2", strategies="ddp,powersgd", micro_batch_size=4)
    assert {each.split.strategy for each in few.candidates} == {"ddp", "powersgd"}


def test_json_is_one_document(ask: Ask) -> None:
    document = ask("tiny --hardware box.yaml --json")
    pick = document["pick"]
    assert pick in document["candidates"]
    total = pick["memory_bytes"].pop("total")
    assert total == sum(pick["memory_bytes"].values())
    for each in document["candidates"]:
        assert bool(each["obstacle"]) == (each["step"] is None)
        assert each["micro_batch_size"] * each["num_micro_batches"] == 16


@pytest.mark.parametrize(
    ("model", "hardware"), [("xl", "h100x4"), ("2.7b", "a100-40x8@8"), ("medium", "rtx4090")]
)
def test_a_terminal_of_80_columns_cuts_nothing(
    model: str, hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = planned(model, hardware)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(narrow := io.StringIO(), "isatty", lambda: True)
    print_table(choice, narrow)
    text = re.sub(r"\x1b\[[\d;]*m", "", narrow.getvalue())
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert "\n dp=4".replace("dp=4", choice.rows()[0].split.strategy) in text
    for row in choice.rows()[:20]:
        assert row.split.sizes in text


def test_simulation(ask: Ask) -> None:
    few = "small --hardware h100x8 --strategies invariant,diloco --micro-batch-size 4"
    printed = ask(f"{few} --simulate 8,64 --network ethernet-10g")
    assert "64 ranks" in printed
    assert "diloco" in printed
    points = ask(f"{few} --simulate 8 --json")["simulation"]
    assert {point["world_size"] for point in points} == {8}


def test_what_fits_nowhere(ask: Ask) -> None:
    """By how much."""
    line = "xl --hardware rtx4090x2 --strategies invariant --micro-batch-size 16"
    said = ask(line, 1)
    assert said.count("\n") == 1
    assert all(word in said for word in ("xl fits nowhere on 2 x", " GB short", "more hosts"))
    document = ask(f"{line} --json", 1)
    assert (document["pick"], document["commands"]) == (None, [])


BAD_REQUESTS = """
xxl                                             unknown model preset 'xxl'
xl --hardware h1000x4                           unknown device 'h1000'
xl --hardware nowhere.yaml                      cannot read hardware file nowhere.yaml
xl --hardware h100x2 --nodes 0                  --nodes must be at least 1; got 0
xl --hardware h100x2 --nodes 2                  --hardware says how many
xl --hardware h100x2@2 --network tokenring      unknown network 'tokenring'
xl --hardware bad.yaml                          hardware file bad.yaml
xl --hardware h100 --strategies zero9           perhaps you meant 'zero
xl --hardware h100 --tokens-per-update 1000     nearest legal
xl --hardware h100 --micro-batch-size 3         nearest legal
xl --hardware h100 --dtype fp8                  fp8
xl --hardware h100 --simulate 8,x               --simulate takes numbers
xl --hardware h100 --simulate 0                 --simulate takes numbers
xl --hardware h100 --simulate 8                 8 hosts need a network (--network
xl --hardware h100 --data nowhere               nowhere is no directory
"""


@pytest.mark.parametrize("request_", BAD_REQUESTS.strip().splitlines())
def test_bad_request_gets_one_clear_message(request_: str, ask: Ask) -> None:
    line, message = re.split(" {2,}", request_)
    said = ask(line, 2)
    assert message in " ".join(said.split())
    assert "Traceback" not in said


def test_this_machine(monkeypatch: pytest.MonkeyPatch, ask: Ask) -> None:
    monkeypatch.setattr("gradsync.commands.cli.plan.detect_hardware", seen_here)
    document = ask("tiny --no-probe --nproc-per-node 3 --nodes 2 --json")
    assert document["hardware"]["hosts"][0]["count"] == 2
    assert max(each["ranks"] for each in document["candidates"]) == 6


def seen_here(
    env: Any, *, num_hosts: int | None = None, ranks_per_host: int | None = None
) -> Hardware:
    device = load_hardware("t4").devices[0]
    link = Link(name="cable", alpha_s=0.0, bytes_per_s=1e9)
    host = Host(devices=(device,) * (ranks_per_host or 1), link=link, cores=4, memory_bytes=GB)
    return Hardware(hosts=(host,) * (num_hosts or 1), network=link)


@pytest.mark.parametrize("load", [0.1, 7.0])
def test_a_leaf_is_measured_here(
    load: float, ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile is used; on a busy machine it is not kept, and the answer says so."""
    asked: list[int] = []

    def probe(work: Workload, ranks: int) -> StepProfile:
        asked.append(ranks)
        return replace(estimate_profile(work, hardware.devices[0]), update_s=1.25)

    hardware = load_hardware("box.yaml")
    monkeypatch.setenv("GRADSYNC_CACHE", "cache")
    monkeypatch.setattr("gradsync.commands.cli.plan.detect_hardware", lambda *_, **__: hardware)
    monkeypatch.setattr("gradsync.commands.plan.choice.probe_profile", probe)
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    printed = ask("tiny")
    assert asked == [2]
    assert (tmp_path / "cache").exists() == (load < 1)
    assert "of 2 x 256 tokens, update 1.25 s; other micro-batches in proportion" in printed
    assert ("busy with other work (load 7.0)" in printed) == (load > 1)
    ask("2.7b", 1)  # a replica has no room: nothing is measured
    assert len(asked) == 1


def test_a_batch_that_the_recipes_leaf_does_not_divide() -> None:
    """Six sequences: leaves of two; asked for by name, the recipe's four are refused."""
    options = PlanOptions(model="xl", hardware="h100", tokens_per_update=6 * 1024)
    request = request_of(options)
    assert request.search.micro_batch_sizes == (2, 1)
    assert request.work.num_leaves == 3
    assert request.flags == ("--tokens-per-update", "6144")
    with pytest.raises(ConfigError, match="nearest legal"):
        request_of(replace(options, micro_batch_size=4))


def test_arithmetic_is_the_trainers() -> None:
    """Splits that are called impossible are those that `gradsync train --parallel` refuses."""
    assert [name for name in STRATEGIES if goes_with_parts(name)] == [
        split.strategy
        for split in splits(4, load_hardware("h100x4"), tuple(STRATEGIES))
        if split.layout == ParallelLayout(dp=2, pp=2)
    ]
    config = recipe("small")
    for layout in (
        ParallelLayout(dp=d, pp=p, tp=t) for d in (1, 2, 3) for p in (1, 2, 13) for t in (1, 2, 5)
    ):
        plan = config.batch_plan(1)
        work = Workload(
            model=config.model,
            micro_batch_size=plan.micro_batch_size,
            seq_len=1024,
            num_leaves=plan.num_micro_batches,
        )
        try:
            check_layout(config, layout, plan)
            refused = False
        except ValueError:
            refused = True
        said = obstacle(work, Split(strategy="invariant", layout=layout))
        assert bool(said) == refused, (layout, said)


def test_the_guide_shows_what_is_printed() -> None:
    """`tools/plan_output.py` writes it anew."""
    pages = [page for page in plan_output.PAGES if "$ gradsync plan " in (ROOT / page).read_text()]
    assert "docs/guide/planning.md" in pages
    assert plan_output.main(["--check"]) == 0


def test_every_line_of_the_guide_can_be_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "guide" / "planning.md").read_text()
    document = page.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "cluster.yaml").write_text(document)
    monkeypatch.chdir(tmp_path)
    assert len(load_hardware("cluster.yaml").devices) == 8
    lines = [line for line in page.splitlines() if line.startswith("gradsync plan ")]
    assert len(lines) > 5
    for line in lines:
        options = tyro.cli(PlanOptions, args=shlex.split(line, comments=True)[2:])
        assert request_of(options).search.strategies


def test_how_often_to_save(ask: Ask) -> None:
    line = "tiny --hardware box.yaml --no-probe"
    assert "--checkpoint.every" not in ask(line)
    said = ask(f"{line} --mtbf-hours 2 --save-s 0.5")
    (row,) = [row for row in said.splitlines() if row.startswith("save ")]
    steps = int(row.partition("--checkpoint.every ")[2].partition(":")[0])
    seconds = picked("tiny", "box.yaml").seconds
    assert steps == round((2 * 0.5 * 7200) ** 0.5 / seconds)
    assert "every 2 h" in row


@pytest.mark.parametrize("more", ["--mtbf-hours -2", "--mtbf-hours 1 --save-s -1"])
def test_times_that_cannot_be(ask: Ask, more: str) -> None:
    assert "--mtbf-hours must be a number from 0" in ask(f"tiny --hardware box.yaml {more}", code=2)
