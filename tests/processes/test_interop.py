"""Beside Hugging Face Accelerate and Lightning Fabric, where installed: communication hooks reach
the DDP inside, and `gs.replicate` refuses models that another mechanism synchronises.

`GRADSYNC_TEST_REQUIRE=interop` makes a missing package fail, and runs the examples around those
libraries; `all` does not ask for them.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradsync.errors import ConfigError
from gradsync.sync.comm_hook import comm_hook
from gradsync.sync.replicate import replicate
from support.fork_server import run_forked, torch_ranks
from support.rank_session import open_session

PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}
EXAMPLES = Path(__file__).parents[2] / "examples"


def _is_required() -> bool:
    return "interop" in os.environ.get("GRADSYNC_TEST_REQUIRE", "").split(",")


def _require(package: str) -> None:
    if importlib.util.find_spec(PACKAGES[package]) is None:
        if _is_required():
            pytest.fail(f"{package} is not installed", pytrace=False)
        pytest.skip(f"{package} is not installed")


@contextmanager
def _environment(rank: int, world_size: int) -> Iterator[None]:
    """The variables that torchrun sets; some of these libraries write more, and do not clean up."""
    before = dict(os.environ)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # not used: the process group is there already
        "TORCHELASTIC_RUN_ID": "interop",
        "GROUP_RANK": "0",
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _accelerate(model: nn.Module, world_size: int) -> tuple[nn.Module, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    return accelerator.prepare(model), accelerator.backward


def _fabric(model: nn.Module, world_size: int) -> tuple[nn.Module, Any]:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=world_size)
    fabric.launch()
    assert fabric.world_size == world_size
    return fabric.setup(model), fabric.backward


def _forget_accelerate() -> None:
    """It keeps its state for the life of the process."""
    if importlib.util.find_spec("accelerate"):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)


def _gradient(
    rank: int, world_size: int, store_path: str, package: str, strategy: str
) -> tuple[list[float], bool]:
    """The first gradient on each rank, and whether the hook saw a bucket."""
    session = open_session(rank, world_size, store_path)
    with session, _environment(rank, world_size):
        torch.manual_seed(0)
        model = nn.Linear(3, 1, bias=False)
        wrap = _accelerate if package == "accelerate" else _fabric
        wrapped, backward = wrap(model, world_size)
        hook = comm_hook(strategy)
        buckets = []
        average = hook.average

        def noted(group: Any, bucket: Any) -> Any:
            buckets.append(bucket.index())
            return average(group, bucket)

        hook.average = noted
        hook.register(wrapped)
        backward(wrapped(torch.full((1, 3), float(rank + 1))).sum())
        _forget_accelerate()
        return model.weight.grad.flatten().tolist(), buckets == [0]


@pytest.mark.parametrize("strategy", ["ring", "hierarchical"])
@pytest.mark.parametrize("package", list(PACKAGES))
def test_a_hook_reaches_the_ddp_inside(pool: Any, package: str, strategy: str) -> None:
    _require(package)
    assert pool.run(_gradient, 2, package, strategy) == [([1.5] * 3, True)] * 2


# -- gs.replicate on a model that another mechanism synchronises -----------------------------------


def _ddp(model: nn.Module, world_size: int) -> tuple[nn.Module, Any]:
    return DistributedDataParallel(model), Tensor.backward


def _composable(model: nn.Module, world_size: int) -> tuple[nn.Module, Any]:
    from torch.distributed._composable import replicate as synchronised

    return synchronised(model), Tensor.backward


def _fsdp2(model: nn.Module, world_size: int) -> tuple[nn.Module, Any]:
    replicate(model, strategy="fsdp").close()  # it stays sharded
    return model, Tensor.backward


WRAPPERS = {
    "accelerate": _accelerate,
    "fabric": _fabric,
    "ddp": _ddp,
    "composable": _composable,
    "fsdp": _fsdp2,
}


def _refusals(rank: int, world_size: int, store_path: str, name: str) -> list[str]:
    """Errors when the wrapper is replicated, and when the model in it is, before or after."""
    said = []
    with open_session(rank, world_size, store_path), _environment(rank, world_size):
        for given in ["wrapper"] if name in ("composable", "fsdp") else ["wrapper", "in", "before"]:
            model: nn.Module = nn.Linear(3, 1, bias=False)
            sync = replicate(model) if given == "before" else None
            wrapped, _ = WRAPPERS[name](model, world_size)
            try:
                sync = sync or replicate(wrapped if given == "wrapper" else model)
                with torch.no_grad():
                    wrapped(torch.ones(1, 3))  # evaluation through the wrapper is allowed
                wrapped(torch.ones(1, 3))
            except ConfigError as error:
                said.append(str(error))
            if sync is not None:
                sync.close()
                wrapped(torch.ones(1, 3)).sum().backward()
        if name == "accelerate":
            _forget_accelerate()
    return said


@pytest.mark.parametrize("name", list(WRAPPERS))
def test_a_model_that_is_synchronised_already_is_refused(pool: Any, name: str) -> None:
    if name in PACKAGES:
        _require(name)
    owner = "FSDP has sharded" if name == "fsdp" else "DistributedDataParallel synchronises"
    for said in pool.run(_refusals, 2, name):
        assert len(said) == (1 if name in ("composable", "fsdp") else 3)
        assert all(text.startswith(f"torch's {owner} this model already") for text in said)


# -- examples --------------------------------------------------------------------------------------


def _printed(name: str, world_size: int, *arguments: object) -> str:
    """Output of rank 0 of an example under variables as torchrun sets them."""
    ranks = [
        each | {"LOCAL_RANK": each["RANK"], "LOCAL_WORLD_SIZE": each["WORLD_SIZE"]}
        for each in torch_ranks(world_size)
    ]
    elastic = {"TORCHELASTIC_RUN_ID": "interop", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    first, *others = run_forked([EXAMPLES / name, *arguments], [each | elastic for each in ranks])
    assert all(other.ok().stdout == "" for other in others)
    return first.ok().stdout


@pytest.mark.parametrize("name", ["fabric_strategy.py", "accelerate_loop.py"])
def test_a_loop_of_another_library_learns_on_equal_replicas(name: str) -> None:
    compile((EXAMPLES / name).read_text(), name, "exec")
    for sync in ["invariant", "bucketed"] if _is_required() else []:
        printed = _printed(name, 2, sync)
        (loss,) = re.findall(r"loss ([0-9.]+), 1 kind\(s\) of weights", printed)
        assert float(loss) < 0.05


def test_a_loop_like_torchtitans_goes_on_with_other_ranks(tmp_path: Path) -> None:
    name = "titan_loop.py"
    compile((EXAMPLES / name).read_text(), name, "exec")
    for sync in ["fsdp", "invariant"] if _is_required() else []:
        _printed(name, 2, sync, tmp_path / sync)
        later = {_printed(name, ranks, sync, tmp_path / f"{sync}-30") for ranks in (2, 3)}
        (said,) = later  # the same losses
        (loss,) = re.findall(r"step 60, loss [0-9.]+ to ([0-9.]+)", said)
        assert float(loss) < 1.0
