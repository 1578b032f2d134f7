"""Each rule in a small script that makes its mistake, and in one that does not.

A line that ends in `# GS…` must be found by that rule, and nothing else may be.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from gradsync.commands.cli.main import main
from gradsync.commands.lint.rules import RULES, lint
from gradsync.commands.lint.script import Script
from gradsync.errors import ConfigError

SETUP = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

if "RANK" in os.environ:
    dist.init_process_group("nccl")
rank, local_rank = int(os.environ.get("RANK", 0)), int(os.environ.get("LOCAL_RANK", 0))
world_size = dist.get_world_size()
torch.cuda.set_device(local_rank)
model = nn.Linear(8, 8).cuda(local_rank)
"""
"""Lines that are right in all of them; line numbers count from behind these."""

WRONG: dict[str, list[str]] = {
    "GS101": [
        """
        ddp = DDP(model)
        for i, (x, y) in enumerate(loader):
            loss = criterion(ddp(x), y) / steps
            if (i + 1) % steps:
                with ddp.no_sync():
                    loss.backward()  # GS101
            else:
                loss.backward()
                optimizer.step()
        """
    ],
    "GS102": [
        """
        ddp = DDP(model)
        for micro in range(steps):
            logits = ddp(x)
            ddp.require_backward_grad_sync = micro == steps - 1  # GS102
            (logits.sum() / steps).backward()
        optimizer.step()
        """
    ],
    "GS103": [
        """
        ddp = DDP(model)
        for i, x in enumerate(loader):  # GS103
            (ddp(x).sum() / steps).backward()
            if (i + 1) % steps == 0:
                optimizer.step()
        """
    ],
    "GS104": [
        """
        for i, x in enumerate(loader):
            loss = model(x).mean()
            loss.backward()  # GS104
            if (i + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
        """
    ],
    "GS107": [
        """
        for micro_batch in batch:
            sync.backward(loss(micro_batch), micro_batch)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # GS107
        sync.step(optimizer)
        """
    ],
    "GS201": [
        """
        sampler = DistributedSampler(dataset, shuffle=True)  # GS201
        loader = DataLoader(dataset, 8, sampler=sampler)
        for epoch in range(3):
            for x in loader:
                train(x)
        """
    ],
    "GS203": [
        """
        ddp = DDP(model)
        loader = DataLoader(dataset, batch_size=8, shuffle=True)  # GS203
        """
    ],
    "GS204": [
        """
        batch_size = 512 // world_size  # GS204
        """,
        """
        accumulation = global_batch // (micro_batch * world_size)  # GS204
        steps = tokens_per_update // (micro * world_size * 128)  # GS204
        """,
    ],
    "GS205": [
        """
        sampler = DistributedSampler(held_out, shuffle=False)  # GS205
        loader = DataLoader(held_out, 8, sampler=sampler)
        """
    ],
    "GS301": [
        """
        device = f"cuda:{rank}"  # GS301
        """,
        """
        model = model.to(rank)  # GS301
        """,
        """
        device = torch.device("cuda", int(os.environ["RANK"]))  # GS301
        """,
    ],
    "GS401": [
        """
        with gs.init() as world:
            if world.is_main:
                total = gs.all_reduce(total)  # GS401
        """,
        """
        def report(total):
            if dist.get_rank() == 0:
                dist.all_reduce(total)  # GS401
                print(total)
        """,
        """
        is_main = rank == 0
        if is_main and verbose:
            save()
            torch.distributed.broadcast(x, 0)  # GS401
        """,
    ],
    "GS402": [
        """
        ddp = DDP(model)
        if rank == 0:
            ddp.eval()
            print(ddp(x))  # GS402
        """,
        """
        model = DDP(model)
        if not rank:
            score = evaluate(model, loader)  # GS402
        """,
        """
        ddp = DDP(model)
        def check():
            if rank != 0:
                return None
            return ddp(x)  # GS402
        """,
    ],
    "GS403": [
        """
        torch.save(model.state_dict(), "model.pt")  # GS403
        """,
        """
        def finish():
            model.save_pretrained("out")  # GS403
        finish()
        """,
    ],
    "GS501": [
        """
        loss = criterion(model(x), y)
        dist.all_reduce(loss)  # GS501
        loss = loss / world_size
        """,
        """
        accuracy = correct.float().mean()
        dist.all_reduce(accuracy, op=dist.ReduceOp.AVG)  # GS501
        """,
    ],
}

RIGHT: dict[str, str] = {
    "saved into memory, or under a name of the rank's own": """
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        path = f"model-{rank}.pt"
        torch.save(model.state_dict(), path)
        """,
    "micro-batches by the handle, by the mean over them, and a step for each": """
        for step in gs.loader(data, world, global_batch_size=64, micro_batch_size=8):
            for leaf in step:
                sync.backward(model(leaf.inputs).mean(), leaf)
            sync.step(optimizer, clip_norm=1.0)
            for leaf in step:
                (model(leaf.inputs).mean() / len(step)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        """,
    "accumulation as it should be": """
        ddp = DDP(model)
        for i, (x, y) in enumerate(loader):
            is_last = (i + 1) % steps == 0
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                loss = criterion(ddp(x), y) / steps
                loss.backward()
            if (i + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
    "the flag before the forward": """
        ddp = DDP(model)
        for micro in range(steps):
            ddp.require_backward_grad_sync = micro == steps - 1
            loss = ddp(x).mean() / steps
            loss.backward()
        optimizer.step()
        """,
    "a step of the user's own inside no_sync": """
        ddp = DDP(model)
        with ddp.no_sync():
            training_step(batch).backward()
        """,
    "sums, divided by their number": """
        for i, x in enumerate(loader):
            loss = F.cross_entropy(model(x), y, reduction="sum")
            loss.backward()
            if (i + 1) % steps == 0:
                scale_gradients(1 / count)
                optimizer.step()
        """,
    "a sampler that is told the epoch": """
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, 8, sampler=sampler)
        for epoch in range(3):
            sampler.set_epoch(epoch)
        held_out = DistributedSampler(validation, shuffle=False, drop_last=True)
        """,
    "a loader that is chosen": """
        ddp = DDP(model)
        sampler = DistributedSampler(dataset) if world_size > 1 else None
        sampler.set_epoch(0)
        loader = DataLoader(dataset, 8, sampler=sampler, shuffle=sampler is None)
        """,
    "a remainder that is refused": """
        assert 512 % world_size == 0
        batch_size = 512 // world_size
        """,
    "devices of the local rank": """
        device = f"cuda:{local_rank}"
        model = model.to(local_rank)
        ddp = DDP(model, device_ids=[local_rank])
        here = rank % torch.cuda.device_count()
        torch.cuda.set_device(here)
        """,
    "spawned ranks of one host": """
        def worker(rank, size):
            torch.cuda.set_device(rank)
            model.to(rank)
        torch.multiprocessing.spawn(worker, args=(2,), nprocs=2)
        """,
    "a barrier for all": """
        if rank == 0:
            download()
        dist.barrier()
        if rank != 0:
            load()
        """,
    "a broadcast from either side": """
        if rank == 0:
            dist.broadcast(numbers, 0)
        else:
            dist.broadcast(room, 0)
        """,
    "rank 0 and the plain model": """
        ddp = DDP(model)
        if rank == 0:
            print(evaluate(ddp.module, loader))
            torch.save(ddp.module.state_dict(), "model.pt")
        dist.barrier()
        """,
    "a function that rank 0 calls": """
        def save(path):
            torch.save(model.state_dict(), path)
        if rank == 0:
            save("model.pt")
        """,
    "products of ranks": """
        assert global_batch % (micro_batch * world_size) == 0
        accumulation = global_batch // (micro_batch * world_size)
        steps_per_epoch = len(dataset) // (batch_size * world_size)
        """,
    "quiet on purpose": """
        batch_size = 512 // world_size  # gradsync: ignore[GS204]
        device = f"cuda:{rank}"  # gradsync: ignore
        """,
}


def written(text: str) -> str:
    return SETUP + textwrap.dedent(text)


def marked(text: str) -> list[tuple[int, str]]:
    return [
        (number, found[1])
        for number, line in enumerate(text.splitlines(), 1)
        if (found := re.search(r"# (GS\d+)$", line))
    ]


@pytest.mark.parametrize(
    "text", [pytest.param(t, id=f"{n}-{k}") for n, ts in WRONG.items() for k, t in enumerate(ts)]
)
def test_a_mistake_is_found_in_its_line(text: str) -> None:
    script = written(text)
    found = [(each.line, each.rule.id) for each in lint(Script("train.py", script))]
    assert marked(script)
    assert [each for each in found if each in marked(script)] == marked(script)
    accused = {"GS104", "GS103", "GS203"}  # may stand beside another mistake
    assert {rule for _, rule in found} - {rule for _, rule in marked(script)} <= accused


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_not_accused(name: str) -> None:
    assert [(e.line, e.rule.id) for e in lint(Script("train.py", written(RIGHT[name])))] == []


def test_every_rule_is_tried() -> None:
    assert {rule.id for rule in RULES} == {*WRONG}


def test_the_guide_has_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs" / "guide" / "lint.md").read_text("utf-8")
    rows = [f"| {r.id} | {r.level} | {r.says} | {r.why} | {r.fix} |" for r in RULES]
    between = page.split("<!-- lint: rules -->\n")[1].split("\n<!-- lint: end -->")[0]
    assert between.splitlines()[2:] == rows


def test_the_examples_are_right() -> None:
    folder = Path(__file__).parents[3] / "examples"
    found = [e for p in folder.glob("*.py") for e in lint(Script(str(p), p.read_text()))]
    assert found == []


@pytest.mark.parametrize("text", ["def f(:", "x = 1\n  y = 2", "\x00", "print 'hello'"])
def test_what_is_not_python_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.py:\d+: not Python"):
        Script("train.py", text)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.py").write_text("print('hello')\n")
    (tmp_path / "bad.py").write_text(written(WRONG["GS401"][0]))
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "other.py").write_text("def f(:")
    assert main(["lint", str(tmp_path / "good.py")]) == 0
    assert capsys.readouterr().out == "1 file: nothing found\n"
    assert main(["lint", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert re.search(r"bad\.py:\d+: GS401 error: a collective that only some ranks call\n", out)
    assert out.endswith("2 files: 1 mistake\n")
    assert main(["lint", "--json", str(tmp_path)]) == 1
    (found,) = json.loads(capsys.readouterr().out)["found"]
    assert (found["id"], found["level"]) == ("GS401", "error")


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "name a script"), (["nowhere.py"], "nowhere.py is not there")]
)
def test_bad_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", *arguments]) == 2
    assert said in capsys.readouterr().err
