"""`gs.save` and `gs.load`: a script goes on from what was written, whatever happened since."""

from __future__ import annotations

import enum
import errno
import json
import math
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradsync as gs
from gradsync.checkpoint.background import BackgroundWriter
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.core.files import Filesystem
from gradsync.errors import CheckpointError, ConfigError, DataError, RunError
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.world import World
from support.engine_cases import bits, optimizers, pretend_hosts
from support.thread_ranks import run_thread_ranks

ON_PROCESSES = ("ddp", "powersgd", "fsdp")
DATA = [(torch.linspace(-1, 1, 3) + n, n % 2) for n in range(24)]


class Net(nn.Module):
    """Tied weights, a buffer, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))
        self.calls = 0
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def run(
    world_size: int,
    folder: Path,
    *,
    strategy: str = "invariant",
    number: int = 1,
    steps: int,
    save_at: tuple[int, ...] = (),
    keep: int = 3,
    **options: Any,
) -> tuple[Any, tuple[int, Any]]:
    """Load, train up to `steps`, saving after some; the last state, and what was loaded."""

    def work(rank: int, comm: Any) -> Any:
        model = Net()
        world = World(
            rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
        )
        hosts = {"hosts": pretend_hosts(comm, 1)} if strategy == "hierarchical" else {}
        sync = replicate(model, comm=comm, strategy=strategy, **hosts, **options)
        optimizer = optimizers(model, number)
        loader = gs.loader(DATA, world, global_batch_size=8, micro_batch_size=2, seed=3)
        given = {"model": model, "optimizer": optimizer, "loader": loader}
        found = gs.load(folder, **given)
        if found[0] < steps:
            for batch in loader:
                for micro_batch in batch:
                    with sync.micro_step(last=micro_batch.is_last, index=micro_batch.index):
                        loss = sync.forward(micro_batch.inputs).square().mean()
                        sync.backward(loss, micro_batch)
                model.calls += 1
                sync.step(optimizer, clip_norm=1.0)
                done = batch.number + 1
                if done in save_at:
                    extra = {"best": (0.5, None), 7: [torch.arange(3) + done, "text"]}
                    gs.save(folder, step=done, extra=extra, keep_last=keep, **given)
                if done == steps:
                    break
        state = sync.state_dict(optimizer)
        loader.close()
        sync.close()
        return state, found

    if world_size == 1:
        return work(0, SingleCommunicator())

    def of_group(rank: int, group: dist.ProcessGroup) -> Any:
        return work(rank, ProcessGroupCommunicator(group))

    first, *rest = run_thread_ranks(of_group, world_size)
    assert all(bits(first[0]) == bits(other[0]) for other in rest)
    assert all(repr(first[1]) == repr(other[1]) for other in rest)
    return first


@pytest.mark.parametrize(
    ("strategy", "number"),
    [
        (name, number)
        for name in STRATEGIES
        if name not in ON_PROCESSES
        for number in (1, 2)
        if number == 1 or STRATEGIES[name].same_on_any_ranks
    ],
)
def test_a_script_goes_on_with_the_same_bits(strategy: str, number: int, tmp_path: Path) -> None:
    """What follows during the write does not change what is written."""
    more = {"inner_steps": 2} if strategy in ("local_sgd", "diloco") else {}
    kind = {"strategy": strategy, "number": number, **more}
    whole, start = run(2, tmp_path / "a", steps=6, save_at=(2, 4), **kind)
    assert start == (0, None)
    run(2, tmp_path / "b", steps=5, save_at=(2, 4), **kind)
    parts, start = run(2, tmp_path / "b", steps=6, **kind)
    assert start[0] == 4
    assert start[1]["best"] == (0.5, None)
    assert start[1][7][1] == "text"
    assert torch.equal(start[1][7][0], torch.tensor([4, 5, 6]))
    assert bits(whole) == bits(parts)
    assert whole["model"]["_extra_state"] == {"calls": 6}
    if STRATEGIES[strategy].promise == "bitwise":
        for world_size in (1, 3):
            other, _ = run(world_size, tmp_path / "b", steps=6, **kind)
            assert bits(whole["model"]) == bits(other["model"])


def test_files_are_those_of_a_run(tmp_path: Path) -> None:
    run(2, tmp_path, steps=5, save_at=(1, 2, 3, 4, 5), keep=2)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000004", "step-00000005"]
    snapshot = CheckpointStore(tmp_path).load(tmp_path / "step-00000005")
    assert snapshot.tensors["model"].keys() == Net().state_dict().keys() - {"_extra_state"}
    (tmp_path / "step-00000005" / "model.safetensors").write_bytes(b"torn")
    assert run(1, tmp_path, steps=4)[1][0] == 4


def alone(model: Net) -> Any:
    return replicate(model, comm=SingleCommunicator())


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "step": ({"step": 1.5}, "step is 1.5"),
    "negative": ({"step": -1}, "step is -1"),
    "loader": ({"loader": DATA}, "list has no state_dict"),
    "key": ({"extra": {("a", 1): 0.5}}, r"has the key \('a', 1\)"),
    "lock": ({"extra": [threading.Lock()]}, "script/extra/0 is a lock"),
    "keep": ({"keep_last": 0}, "keep_last: got 0"),
}


@pytest.mark.parametrize("name", ODD)
def test_what_cannot_be_saved_is_said_at_once(name: str, tmp_path: Path) -> None:
    model = Net()
    sync = alone(model)
    given, said = ODD[name]
    with pytest.raises(ConfigError, match=said):
        gs.save(tmp_path, **{"step": 1, "model": model, **given})
    sync.close()
    assert not list(tmp_path.iterdir())


class Word(str, enum.Enum):  # noqa: UP042 (as in many a script)
    A = "a"


def test_extra_comes_back_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a wrapper gives, tensors that need gradients, and a folder as it was then."""
    monkeypatch.chdir(tmp_path)
    model, other = Net(), Net()
    sync, _ = alone(model), alone(other)  # each waits for the other's write
    monkeypatch.setattr(Filesystem, "sync_file", lambda *_: time.sleep(0.1))
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    weight = torch.ones(2, requires_grad=True)
    extra = {
        "ema": average.state_dict(),
        "module": {"w": weight * 2, "w.x": 1},
        "w": torch.zeros(2, dtype=torch.int8),
        "odd": [math.nan, -math.inf, 2**70, np.float32(0.5), np.bool_(True), Word.A, None],
        True: ("a", ()),
        "milestones": Counter([2, 5, 5]),
    }
    gs.save("mine", step=0, model=model, extra=extra)
    (tmp_path / "link").symlink_to(tmp_path)
    gs.save("link/mine", step=1, model=other, extra=extra, keep_last=9)
    assert (tmp_path / "mine" / "step-00000000").exists()
    (tmp_path / "mine" / "step-notes").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    step, found = gs.load(tmp_path / "mine", model=model)
    assert step == 1
    assert bits(found["ema"]) == bits(extra["ema"])
    assert torch.equal(found["module"]["w"], weight * 2)
    assert found["module"]["w.x"] == 1
    assert found["w"].dtype == torch.int8
    assert repr(found["odd"]) == f"[nan, -inf, {2**70}, 0.5, True, 'a', None]"
    assert found[True] == ("a", ())
    assert list(found["milestones"].elements()) == [2, 5, 5]  # MultiStepLR in a SequentialLR
    assert gs.load(tmp_path / "elsewhere", model=model) == (0, None)
    sync.close()


@pytest.mark.parametrize("make", [gs.loader, gs.stream_loader])
def test_a_batch_that_nothing_read_is_not_left_out(make: Any, tmp_path: Path) -> None:
    """At the top of a loop's body, or one that a zip has taken."""
    model = Net()
    alone(model)
    sizes = {"global_batch_size": 8, "micro_batch_size": 8, "num_epochs": 1}
    loader = make(DATA, World(), **sizes, seed=0)
    given = {"folder": tmp_path, "model": model, "loader": loader}
    for batch, _ in zip(loader, range(1), strict=False):
        assert loader.state_dict()["steps"] == 0
        first = list(batch)
        assert loader.state_dict()["steps"] == 1
    gs.save(step=1, **given)
    after = [batch.number for batch in loader if list(batch)]
    assert after == [*range(1, len(after) + 1)]
    gs.load(**given)
    assert [batch.number for batch in loader if list(batch)] == after
    assert len(first) == 1


@pytest.mark.parametrize("change", ["order", "groups", "swapped"])
def test_optimizers_in_another_order_are_refused(change: str, tmp_path: Path) -> None:
    """Torch matches state by position: momenta would be of other weights."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    sync = replicate(model, comm=SingleCommunicator())
    first, second = model.parameters()

    def of(*groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": group} for group in groups], lr=0.1, momentum=0.9)

    saved: Any = [of([first]), of([second])] if change == "swapped" else of([first, second])
    gs.save(tmp_path, step=1, model=model, optimizer=saved)
    others: dict[str, Any] = {
        "order": lambda: of([second, first]),
        "groups": lambda: of([first], [second]),
        "swapped": lambda: saved[::-1],
    }
    with pytest.raises(ConfigError, match="in another order or in other groups"):
        gs.load(tmp_path, model=model, optimizer=others[change]())
    sync.close()


def test_a_damaged_folder_is_no_new_run(tmp_path: Path) -> None:
    run(1, tmp_path / "checkpoints", steps=1, save_at=(1,))
    (tmp_path / "checkpoints/step-00000001/manifest.json").write_text("{}")
    for asked, said in (("checkpoints", "0001"), ("step-00000007", "missing"), ("", "give its")):
        with pytest.raises(CheckpointError, match=said):
            run(2, tmp_path / asked, steps=2)


def test_what_is_not_of_this_run_is_refused(tmp_path: Path) -> None:
    run(1, tmp_path / "mine", steps=1, save_at=(1,))
    other = nn.Linear(3, 3)
    with pytest.raises(ConfigError, match="not replicated"):
        gs.load(tmp_path / "mine", model=other)
    sync = replicate(other, comm=SingleCommunicator())
    with pytest.raises(ConfigError, match=r"has no weight '.*', which"):
        gs.load(tmp_path / "mine", model=other)
    with pytest.raises(ConfigError, match=r"GradientSync is not .*: give the model that"):
        gs.load(tmp_path / "mine", model=sync)  # pyrefly: ignore
    sync.close()
    model = Net()
    sync = alone(model)
    loader = gs.loader(DATA[1:], World(), global_batch_size=8, micro_batch_size=2, seed=3)
    with pytest.raises(DataError):
        gs.load(tmp_path / "mine", model=model, loader=loader)
    CheckpointStore(tmp_path / "of train").save(Snapshot(step=1, tensors={}, state={}))
    with pytest.raises(CheckpointError, match=r"gs\.save did not write it"):
        gs.load(tmp_path / "of train", model=model)
    with pytest.raises(ConfigError, match="script/extra/odd is a set"):
        gs.save(tmp_path / "mine", step=2, model=model, extra={"odd": {1}})
    sync.close()
    assert json.loads((tmp_path / "mine/step-00000001/state.json").read_text())["script"]


class Full(Filesystem):
    def write(self, file: Any, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["step", "close", "stop"])
def test_a_full_disk_ends_the_run(tmp_path: Path, where: str) -> None:
    """In the next step, at the end, or at once where the script is about to leave."""
    model, asked = Net(), threading.Event()
    sync = replicate(model, comm=SingleCommunicator(), world=World(asks_to_stop=asked.is_set))
    optimizer = optimizers(model, 1)
    sync.writers[tmp_path] = BackgroundWriter(CheckpointStore(tmp_path, fs=Full()))
    if where == "stop":
        asked.set()
    sync.backward(model(torch.ones(2, 3)).sum(), weight=2)
    assert sync.step(optimizer).stop == asked.is_set()

    def go_on() -> None:
        gs.save(tmp_path, step=1, model=model, optimizer=optimizer)
        if where == "close":
            sync.close()
        elif where == "step":
            sync.writers[tmp_path]._thread.join()
            sync.backward(model(torch.ones(2, 3)).sum(), weight=2)
            sync.step(optimizer)

    with pytest.raises(CheckpointError, match="No space left on device"):
        go_on()
    sync.close()


def test_a_save_of_rank_0_alone_says_so(tmp_path: Path) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = Net()
        sync = replicate(model, comm=ProcessGroupCommunicator(group))

        def go_on() -> None:
            if rank == 0:
                gs.save(tmp_path, step=1, model=model)
            sync.backward(model(torch.ones(2, 3)).sum(), weight=2)
            sync.step(optimizers(model, 1))

        with pytest.raises(RunError) as caught:
            go_on()
        sync.close()
        return str(caught.value)

    for said in run_thread_ranks(work, 2, timeout_s=20.0):
        assert "does one rank alone save?" in said


def test_nan_is_not_saved(tmp_path: Path) -> None:
    model = Net()
    sync = alone(model)
    with torch.no_grad():
        model.first.bias[0] = torch.nan
    gs.save(tmp_path, step=1, model=model)
    with pytest.raises(CheckpointError, match="nan or inf"):
        sync.close()
    assert not list(tmp_path.glob("step-*"))
