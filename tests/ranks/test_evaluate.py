"""Evaluation is exact: every sample once, whatever the number of ranks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, evaluate
from gradsync.data.loader import EvalLoader
from gradsync.errors import RunError
from gradsync.world import World
from support.thread_ranks import run_thread_ranks

SHAPE = GPTConfig(n_layer=1, n_head=2, n_embd=16, vocab_size=13, block_size=8, dropout=0.5)


class Samples:
    """23 sequences of 8 tokens; every third has -100 targets, one has nothing else."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(13, (9,), generator=torch.Generator().manual_seed(index))
        inputs, targets = drawn[:-1], drawn[1:].clone()
        if index % 3 == 0:
            targets[: index % 8] = -100
        if index == 11:
            targets[:] = -100
        return inputs, targets


def micro_batches_of(rank: int, world_size: int, micro_batch_size: int) -> EvalLoader:
    world = World(rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size)
    return EvalLoader(Samples(), world, micro_batch_size)


def one_rank(micro_batch_size: int) -> float:
    micro_batches = micro_batches_of(0, 1, micro_batch_size)
    return evaluate(GPT(SHAPE), micro_batches, SingleCommunicator(), nullcontext())


def test_the_mean_of_all_targets_that_count() -> None:
    """Against the plain formula, one sample at a time."""
    model = GPT(SHAPE).eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for inputs, targets in map(Samples().__getitem__, range(23)):
            logits = model(inputs[None])[0].log_softmax(dim=-1)
            for row, target in zip(logits, targets.tolist(), strict=True):
                if target != -100:
                    total, count = total - row[target].item(), count + 1
    assert 0 < count < 23 * 8
    assert one_rank(4) == pytest.approx(total / count, rel=1e-6)


# Of 23 samples: 6 micro-batches, the last of 3; 3, fewer than four ranks; 23.
@pytest.mark.parametrize("micro_batch_size", [4, 10, 1])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_world_size_gives_the_same(world_size: int, micro_batch_size: int) -> None:
    def work(rank: int, group: Any) -> tuple[float, int]:
        micro_batches = micro_batches_of(rank, world_size, micro_batch_size)
        loss = evaluate(GPT(SHAPE), micro_batches, ProcessGroupCommunicator(group), nullcontext())
        return loss, len(micro_batches)

    results = run_thread_ranks(work, world_size)
    losses = [loss for loss, _ in results]
    assert losses == [losses[0]] * world_size  # the same bits on all ranks
    assert losses[0] == pytest.approx(one_rank(micro_batch_size), rel=1e-12, abs=0.0)
    counts = [count for _, count in results]
    assert sum(counts) == -(-23 // micro_batch_size)
    if (world_size, micro_batch_size) == (4, 10):
        assert counts == [0, 1, 1, 1]  # else this would also accept a mean of means


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_missing_sample_fails_on_all_ranks(world_size: int) -> None:
    def work(rank: int, group: Any) -> str:
        micro_batches = micro_batches_of(rank, world_size, 4)
        kept = list(micro_batches)[1:] if rank == world_size - 1 else list(micro_batches)
        lossy: Any = type("Lossy", (list,), {"total_samples": micro_batches.total_samples})(kept)
        with pytest.raises(RunError) as caught:
            evaluate(GPT(SHAPE), lossy, ProcessGroupCommunicator(group), nullcontext())
        return str(caught.value)

    message = "evaluation counted 19 samples, the set has 23"
    assert run_thread_ranks(work, world_size) == [message] * world_size


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = GPT(SHAPE).train(training)
    random = torch.get_rng_state()
    with_dropout_off = evaluate(
        model, micro_batches_of(0, 1, 4), SingleCommunicator(), nullcontext()
    )
    assert with_dropout_off == one_rank(4)
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)  # no dropout was drawn


def test_it_computes_under_the_given_autocast() -> None:
    seen: list[torch.dtype] = []
    model = GPT(SHAPE)
    model.register_forward_hook(lambda _m, _i, logits: seen.append(logits.dtype))
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    loss = evaluate(model, micro_batches_of(0, 1, 10), SingleCommunicator(), autocast)
    assert seen == [torch.bfloat16] * 3
    assert loss == pytest.approx(one_rank(10), rel=1e-2)


def test_sums_are_kept_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 a sum of 2**24 + 1 + 1 loses the ones."""
    values = iter((float(2**24), 1.0, 1.0))
    monkeypatch.setattr(
        "gradsync.commands.models.gpt.loss_sum", lambda *_: torch.tensor(next(values))
    )
    micro_batches = micro_batches_of(0, 1, 10)
    targets = sum(micro_batch.num_targets for micro_batch in micro_batches)
    loss = evaluate(GPT(SHAPE), micro_batches, SingleCommunicator(), nullcontext())
    assert loss == (2**24 + 2) / targets
