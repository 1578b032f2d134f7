"""`gs.gather` and `gs.eval_loader`: every sample once, results in the data set's order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

import gradsync as gs
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.world import World
from support.thread_ranks import run_thread_ranks


def gathered(values: list[Any], **named: Any) -> list[Any]:
    """What each rank gets; ranks are threads, so their calls have one name."""

    def work(rank: int, group: dist.ProcessGroup) -> Any:
        return gs.gather(values[rank], comm=ProcessGroupCommunicator(group), **named)

    return run_thread_ranks(work, len(values))


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        *(((2,), torch.float32), ((2, 2), torch.bfloat16), ((2, 2), torch.int64)),
        *(((3, 0, 1), torch.float32), ((3, 0, 1), torch.bool), ((0, 0), torch.complex64)),
    ],
)
def test_tensors_of_other_lengths_follow_each_other(
    rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [torch.arange(8 * n).view(n, 2, 4).add(rank).to(dtype) for rank, n in enumerate(rows)]
    for found in gathered([part.transpose(1, 2) for part in parts]):
        assert torch.equal(found, torch.cat(parts).transpose(1, 2))
        assert found.dtype == dtype


def test_a_number_of_each_rank_is_stacked() -> None:
    for found in gathered([torch.tensor(1.5, requires_grad=True), torch.tensor(2.5)]):
        assert torch.equal(found, torch.tensor([1.5, 2.5]))
        assert not found.requires_grad


def test_other_values_are_a_list() -> None:
    values = [{"text": "ä", "scores": (1, 2.5)}, None]
    assert gathered(values) == [[{"text": "ä", "scores": [1, 2.5]}, None]] * 2


def test_one_rank_needs_nothing_else() -> None:
    """Neither a world nor a process group."""
    assert torch.equal(gs.gather(torch.ones(2)), torch.ones(2))
    assert torch.equal(gs.gather(torch.tensor(3)), torch.tensor([3]))
    assert gs.gather("words") == ["words"]


UNLIKE = {
    "other dtype": (torch.ones(2), torch.ones(2).half(), r"rank 1 has float16 \[2\], rank 0 float"),
    "other width": (torch.ones(2, 3), torch.ones(2, 4), r"rank 1 has float32 \[2, 4\]"),
    "a number": (torch.ones(2), torch.tensor(1.0), r"rank 1 has float32 \[\]"),
    "no tensor": (torch.ones(2), [1.0, 2.0], "rank 1 has no tensor"),
    "of a class": (1, object(), "rank 1 has: a object; it takes a tensor"),
    "a tensor inside": (1, {"a": [torch.ones(1)]}, "rank 1 has: a Tensor; it takes"),
    "keys": (1, {1: 2}, "rank 1 has: a dict; it takes .* strings as keys"),
    "sparse": (torch.ones(2), torch.ones(2).to_sparse(), "rank 1 has: sparse tensors"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_does_not_fit_is_refused_on_all_ranks(name: str) -> None:
    *values, said = UNLIKE[name]

    def work(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(ConfigError, match=said):
            gs.gather(values[rank], comm=ProcessGroupCommunicator(group), name="both")

    run_thread_ranks(work, 2)


def test_another_call_at_the_same_time_is_named() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        call = gs.gather if rank else gs.all_reduce
        with pytest.raises(RunError, match=r"rank 0: all_reduce .*rank 1: gather"):
            call(torch.ones(2), comm=ProcessGroupCommunicator(group))

    run_thread_ranks(work, 2)


def evaluated(world_size: int, num_samples: int, **options: Any) -> list[Tensor]:
    data = TensorDataset(torch.arange(num_samples), torch.arange(num_samples) * 2)

    def work(rank: int, group: dist.ProcessGroup) -> Tensor:
        world = World(
            rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size
        )
        loader = gs.eval_loader(data, world, micro_batch_size=3, **options)
        own = [micro_batch.inputs for micro_batch in loader] or [torch.empty(0, dtype=torch.int64)]
        return gs.gather(torch.cat(own), comm=ProcessGroupCommunicator(group))

    return run_thread_ranks(work, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [1, 6, 11])
def test_an_evaluation_has_each_sample_once_in_order(world_size: int, num_samples: int) -> None:
    for found in evaluated(world_size, num_samples):
        assert torch.equal(found, torch.arange(num_samples))
    for found in evaluated(world_size, num_samples, max_samples=5):
        assert torch.equal(found, torch.arange(min(num_samples, 5)))


def test_an_evaluation_collates_as_training_does() -> None:
    def collate(samples: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.tensor([-int(x) for x, _ in samples]), torch.ones(len(samples))

    (found,) = evaluated(1, 4, collate_fn=collate)
    assert found.tolist() == [0, -1, -2, -3]


def test_an_evaluation_draws_alike_on_any_rank_and_training_does_not_notice() -> None:
    """Dropout that is left on, and a data set that draws; also when it is broken off."""

    class Drawing(list[int]):
        def __getitem__(self, index: Any) -> Tensor:
            return torch.rand(())

    found = []
    for world_size in (1, 2):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        drawn = []
        for rank in range(world_size):
            world = World(rank=rank, world_size=world_size)
            for each in gs.eval_loader(Drawing(range(6)), world, micro_batch_size=2):
                drawn.append(torch.cat([each.batch, torch.rand(2)]))
            for _ in gs.eval_loader(Drawing(range(6)), world, micro_batch_size=2):
                break
        found.append(torch.stack(drawn))
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(*found)
    assert len(found[0].unique()) == found[0].numel()
