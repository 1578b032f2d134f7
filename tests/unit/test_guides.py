"""The guides are right: their Python runs, their tables are the code's."""

from __future__ import annotations

import ast
import json
import re
import signal
import socket
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import claims
import pytest

import gradsync
from gradsync import compat
from gradsync.comm.reductions import ALGORITHMS
from gradsync.commands.launch.local import obituary
from gradsync.commands.lint.rules import RULES, lint
from gradsync.commands.lint.script import Script
from gradsync.commands.models.config import preset
from gradsync.commands.train.check import check_size
from gradsync.commands.train.config_io import parse_config
from gradsync.data.batch_plan import solve_batch_plan
from gradsync.errors import GradsyncError
from gradsync.runtime.coordinator import plan_coordinator
from gradsync.runtime.device import check_not_shared, device_name
from gradsync.runtime.rendezvous import meet
from gradsync.runtime.resolve import resolve
from gradsync.runtime.store import host_store
from gradsync.sync.options import Recipe
from gradsync.sync.registry import STRATEGIES
from support.fork_server import WITH_RANKS, run_forked

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
STRATEGIES_PAGE = next(path for path in GUIDES if path.name == "strategies.md").read_text()
USER_LOOP = next(path for path in GUIDES if path.name == "user-loop.md").read_text()
DETAILS = next(path for path in GUIDES if path.name == "strategy-details.md").read_text()
PROCESS_GROUP = """
import warnings
warnings.simplefilter("error")
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


# A page ends with reductions on a group of torch's own: a gloo worker that still needs Python's
# lock when the interpreter ends would abort the process.
EPILOGUE = """
from gradsync.runtime.gloo_group import wait_until_workers_sleep
assert wait_until_workers_sleep(20.0)
"""


def python_of(text: str, between: str = "\n") -> str:
    """All Python of a page, one block after the other."""
    return between.join(re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "guide", [g for g in GUIDES if python_of(g.read_text())], ids=lambda g: g.name
)
def test_python_runs_on_one_rank(guide: Path, tmp_path: Path) -> None:
    """In the order of the page, each block with the names of those before it."""
    program = PROCESS_GROUP + python_of(guide.read_text()) + EPILOGUE
    (tmp_path / "page.py").write_text(program)
    done = run_forked([tmp_path / "page.py"], cwd=tmp_path)[0].ok()
    assert len(done.stdout.splitlines()) == program.count("print(")


def test_the_script_that_saves_goes_on_after_stops(tmp_path: Path) -> None:
    """On other numbers of ranks, with the weights of a run without stops."""
    page = next(path for path in GUIDES if path.name == "training-loop.md").read_text()
    (script,) = [text for text in python_of(page, "\0").split("\0") if "SystemExit(75)" in text]
    loop = "    for batch in loader:\n"
    assert script.count(loop) == 1
    stop = "        if batch.number in (20, 50):\n            signal.raise_signal(signal.SIGTERM)\n"
    (tmp_path / "whole.py").write_text(script.replace("runs/mine", "runs/whole"))
    (tmp_path / "stops.py").write_text("import signal\n" + script.replace(loop, loop + stop))

    def run(name: str, ranks: int) -> tuple[int, str]:
        launch = ["-m", "gradsync", "launch", "--nproc-per-node", ranks, name]
        (done,) = run_forked(launch, [WITH_RANKS], cwd=tmp_path)
        return done.returncode, done.stdout

    code, weights = run("whole.py", 1)
    assert (code, weights[:8]) == (0, "weights ")
    assert [run("stops.py", ranks) for ranks in (2, 1, 2)] == [(75, ""), (75, ""), (0, weights)]


FIVE = (ROOT / "docs" / "guide" / "from-five-documents.md").read_text()
OF_THE_DOCUMENTS = """
DDPManager initialize wrap_model get_dataloader all_reduce barrier cleanup ElasticGPUConfig
log_gpu_memory init_distributed split_dataset_by_node create_data_loader ddp_enabled ddp_backend
ddp_find_unused_parameters DatasetLoader require_backward_grad_sync tokens_per_update setup
DistributedSampler set_epoch bucket_cap_mb gradient_as_bucket_view find_unused_parameters new_group
NaiveDDPTrainer train_step setup_distributed shard_batch benchmark_results.csv test_ddp.py
launch_ddp_training.sh submit_ddp_training.slurm verify_correctness.py benchmark_naive_ddp.py
run_verification.sh run_benchmark.sh naive_ddp_trainer.py NUM_GPUS MASTER_PORT NCCL_DEBUG FP8 WSL2
--elastic_gpu --gpus_per_node torch.distributed.launch compile_model is_main_process get_device
"""


def test_the_page_of_five_documents_has_every_name_of_theirs() -> None:
    names = OF_THE_DOCUMENTS.split()
    assert [name for name in names if not re.search(rf"(?<!\w){re.escape(name)}", FIVE)] == []
    readme = (ROOT / "README.md").read_text()
    assert "from-five-documents.md" in readme.partition("## ")[0]


def test_names_of_ours_on_that_page_are_there() -> None:
    for name in re.findall(r"\bgs\.(\w+)", FIVE):
        assert hasattr(gradsync, name), name
    for name in re.findall(r"\bmanager\.(\w+)", FIVE):
        assert hasattr(compat.DDPManager(), name), name


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_example_files_are_configurations(path: Path) -> None:
    config = parse_config([str(path)])
    assert config.batch_plan(2).num_micro_batches == 8
    assert config.sync in path.read_text()


def test_the_first_loop_is_the_example() -> None:
    page = next(path for path in GUIDES if path.name == "start-here.md").read_text()
    assert python_of(page) in (ROOT / "examples" / "minimal.py").read_text()


def test_every_extra_says_what_it_brings() -> None:
    page = next(path for path in GUIDES if path.name == "start-here.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted(extras["optional-dependencies"])


def test_scripts_that_people_come_from() -> None:
    """They are Python without known mistakes, and the rules named beside them exist."""
    page = next(path for path in GUIDES if path.name == "moving.md").read_text()
    scripts = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert len(scripts) == 4
    for script in scripts:
        assert {found.rule.level for found in lint(Script("theirs", script))} <= {"note"}
    assert set(re.findall(r"\bGS\d+", page)) <= {rule.id for rule in RULES}


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_strategy_has_its_section(name: str) -> None:
    """When to take it; and in the details, with a picture and its own options."""
    strategy = STRATEGIES[name]
    assert STRATEGIES_PAGE.partition(f"\n### `{name}`\n")[2].partition("\n##")[0].strip()
    section = re.split(rf"^### .*`{name}`.*$", DETAILS, flags=re.MULTILINE)[1]
    section = section.partition("\n##")[0]
    assert section.count("```") == 2
    if strategy.recipe is None:
        inherited = STRATEGIES["ddp"].options if name == "powersgd" else ()
        for option in set(strategy.options) - set(inherited):
            assert f"`{option}" in section, option


def test_the_table_of_recipes_is_the_registry() -> None:
    for name, strategy in STRATEGIES.items():
        if strategy.recipe is not None:
            recipe = strategy.recipe
            parts = [recipe.grouping, "yes" if recipe.overlap else "no", recipe.order]
            parts += [recipe.reduction, recipe.wire, recipe.shard]
            assert f"| `{name}` | {' | '.join(parts)} |" in DETAILS


def test_every_choice_of_the_engine_is_named() -> None:
    picture = DETAILS.partition("## The engine")[2].partition("| name")[0]
    for field in fields(Recipe):
        assert field.name in picture
        for value in re.findall(r"'(\w+)'", str(field.type)):
            assert value in picture, value


def test_the_table_of_algorithms_is_the_code() -> None:
    """The bytes in it are counted in tests/ranks/test_p2p_collectives.py."""
    table = USER_LOOP.partition("| `backend` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", f"| `backend` |{table}", re.M) == list(ALGORITHMS)


# -- messages that pages quote ---------------------------------------------------------------------

TROUBLES = "".join(
    path.read_text() for path in GUIDES if path.name in ("troubleshooting.md", "resuming.md")
)
QUOTED = [
    (said, sources.split())
    for sources, block in re.findall(
        r"^(?:<!-- said in ([\w/. ]+) -->\n)?```\n((?:gradsync: .+\n)+)```", TROUBLES, re.MULTILINE
    )
    for said in re.findall(r"^gradsync: (?:error: |WARNING: )?(.+)$", block, re.MULTILINE)
]
HALF = {"RANK": "0"}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
ONE_HOST = {**BY_HAND, "LOCAL_WORLD_SIZE": "4"}


def under_mpi(rank: int, size: int, here: int) -> dict[str, str]:
    parts = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": here}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in parts.items()}


def without_mpi4py() -> None:
    env = under_mpi(0, 4, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "mpi4py", None)
        meet(env, resolve(env), deadline_s=time.monotonic())


def on_a_taken_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        host_store("127.0.0.1", other.getsockname()[1], one_host=True)


GPU = "5e3c1f0a-9b1d-4c57-8a3e-2f6d0b7c9e41"
RAISED: tuple[Callable[[], object], ...] = (
    lambda: resolve(HALF),
    lambda: plan_coordinator(BY_HAND, resolve(BY_HAND)),
    lambda: resolve(ONE_HOST | under_mpi(1, 2, 2)),
    on_a_taken_port,
    without_mpi4py,
    lambda: device_name("cuda", 0, 0),
    lambda: check_not_shared(["node-a"] * 3, [GPU, "", GPU]),
    lambda: check_size(replace(preset("2.7b"), hidden_dim=10**9), device="cpu", num_nodes=1),
    lambda: solve_batch_plan(
        tokens_per_update=524_288, seq_len=2_048, micro_batch_size=3, world_size=4
    ),
    lambda: solve_batch_plan(global_batch_size=8, micro_batch_size=4, world_size=4),
)


def without_values(said: str) -> str:
    """The first line up to an ellipsis, without numbers; Python's own words for what is missing."""
    said = said.replace("import of mpi4py halted; None in sys.modules", "No module named 'mpi4py'")
    return re.sub(r"\d[\d,.]*(e[+-]\d+)?", "#", re.split(r" …$|\n", said)[0])


def messages() -> Iterator[str]:
    """Messages of the code that are cheap to raise."""
    for call in RAISED:
        with pytest.raises(GradsyncError) as caught:
            call()
        yield str(caught.value)
    yield obituary(1, signal.SIGKILL)
    yield from resolve({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}).warnings


def test_quoted_messages_are_raised() -> None:
    """Quotes without a source, up to numbers; and each that is raised here is quoted."""
    quoted = {without_values(said) for said, sources in QUOTED if not sources}
    assert quoted == {without_values(said) for said in messages()}


def constants_of(path: Path) -> Iterator[str]:
    """All text of a module's strings that is no docstring, in the pieces between its values."""
    tree = ast.parse(path.read_text())
    docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docs:
            yield from (piece.strip() for piece in re.split("%[rsd]", node.value))


@pytest.mark.parametrize(("said", "sources"), [quote for quote in QUOTED if quote[1]])
def test_the_words_of_quoted_messages_are_in_the_source(said: str, sources: list[str]) -> None:
    """Every lower-case word of three letters is in a piece of text of the files that are named."""
    pieces = {piece for source in sources for piece in constants_of(ROOT / source)}
    assert any(piece in said for piece in pieces if " " in piece)
    for piece in sorted(filter(None, pieces), key=len, reverse=True):
        edges = ["(?<![a-z])" * piece[0].isalpha(), "(?![a-z])" * piece[-1].isalpha()]
        said = re.sub(re.escape(piece).join(edges), "#", said)
    left = [word for word in said.split() if re.fullmatch("[a-z]{3,}[,;:.]?", word)]
    assert set(left) <= {"nan"}


# -- commands --------------------------------------------------------------------------------------

PRINTED = {run["command"]: run["prints"] for show in claims.load()["show"] for run in show["run"]}


def test_how_it_works_shows_what_the_page_of_claims_has_run() -> None:
    """Each of its commands, and under it only lines that this one printed."""
    page = next(path for path in GUIDES if path.name == "how-it-works.md").read_text()
    shown = re.findall(r"^```\n\$ (.+)\n((?:.+\n)+)```", page, re.MULTILINE)
    assert len(shown) == page.count("\n$ ") == 5
    for command, lines in shown:
        assert set(lines.splitlines()) <= set(PRINTED[command].splitlines()), command


COMMANDS = json.loads((ROOT / "tools" / "commands.json").read_text())["commands"]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.name)
def test_flags_belong_to_their_commands(guide: Path) -> None:
    """Flags after `--` are a program's own, or a training run's."""
    for line in re.findall(r"\bgradsync [^`#\n]+", guide.read_text()):
        command, _, rest = line.removeprefix("gradsync ").partition(" -- ")
        trained = [f"train {rest}"] if command.startswith(("drill", "tune")) else []
        for words in map(str.split, [command, *trained]):
            named = [word for word in words[: 2 if words[0] == "bench" else 1] if word[0] != "-"]
            flags = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert not flags or flags <= set(COMMANDS[" ".join(["gradsync", *named])]), line
