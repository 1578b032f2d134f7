"""Loops of one's own: `loss.backward()`, `optimizer.step()`, and what must not go wrong there."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support.own_loops import (
    OWN_LOOP,
    assert_gradients,
    assert_replicas_equal,
    gradients,
    loss_of,
    mean_gradients,
    on_ranks,
    start,
    weights,
    x_of,
)
from support.recording import RecordingCommunicator
from support.thread_ranks import run_thread_ranks

every_strategy = pytest.mark.parametrize("name", OWN_LOOP)


# -- the mean after backward ----------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("finish", [False, True])
def test_backward_leaves_the_mean(name: str, finish: bool) -> None:
    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        loss_of(sync.model, rank).backward()
        if finish:
            sync.finish()
            sync.finish()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(0))


@every_strategy
def test_clipping_sees_the_mean(name: str) -> None:
    def loop(rank: int, sync: GradientSync, _: Any) -> Tensor:
        loss_of(sync.model, rank).backward()
        return torch.nn.utils.clip_grad_norm_(sync.model.parameters(), 1e9)

    expected = torch.stack([g.norm() for g in mean_gradients(0).values()]).norm()
    for norm in on_ranks(name, loop):
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0.0)


@every_strategy
def test_nothing_travels_twice(name: str) -> None:
    """`finish`, clipping and the step after a backward send nothing more."""

    def work(rank: int, group: dist.ProcessGroup) -> list[int]:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        model = nn.Linear(6, 6)
        sync = replicate(model, sync=name, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for turn in range(3):
            loss_of(model, rank, turn).backward()
            before = comm.operations.total()
            sync.finish()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(comm.operations.total() - before)
        sync.close()
        return counts

    assert run_thread_ranks(work, 2) == [[0, 0, 0]] * 2


@every_strategy
def test_backward_twice_without_zero_grad(name: str) -> None:
    """As DDP: `.grad` holds the mean of the first, and the mean of the second is added to it."""

    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        for turn in range(3):
            loss_of(sync.model, rank, turn).backward()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(0, 1, 2))


@every_strategy
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zero_grad(name: str, set_to_none: bool) -> None:
    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor | None]:
        for turn in range(3):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(sync.model, rank, turn).backward()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(2))


@every_strategy
def test_training_keeps_replicas_equal(name: str) -> None:
    """Several steps, some parameters used by some ranks only, `.grad` in every state."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor]:
        for turn in range(6):
            loss_of(sync.model, rank, turn, use_branch=(rank + turn) % 3 == 0).backward()
            optimizer.step()
            if turn % 3:
                optimizer.zero_grad(set_to_none=turn % 2 == 0)
        return weights(sync.model)

    found = on_ranks(name, loop)
    assert_replicas_equal(found)
    assert not torch.equal(found[0]["branch.weight"], start().branch.weight)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@every_strategy
def test_create_graph(name: str) -> None:
    """Autograd then puts a new tensor into `.grad` instead of adding to the one that is there.

    Either the sums are right, or it is refused by name.
    """

    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None] | str:
        try:
            with sync.no_sync():
                loss_of(sync.model, rank, 0).backward(create_graph=True)
            loss_of(sync.model, rank, 1).backward(create_graph=True)
        except ConfigError as error:
            return str(error)
        found = {k: None if g is None else g.detach() for k, g in gradients(sync.model).items()}
        sync.model.zero_grad()  # breaks the cycle of which torch warns
        return found

    for found in on_ranks(name, loop):
        if isinstance(found, str):
            assert "create_graph" in found
        else:
            assert_gradients(found, mean_gradients(0, 1))


# -- accumulation ---------------------------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("overlap", [True, False])
def test_no_sync_adds_up(name: str, overlap: bool) -> None:
    options = {} if name == "naive" else {"overlap": overlap, "bucket_mb": 1e-9}

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor | None]:
        for _ in range(2):  # buckets are laid out anew after the first
            optimizer.zero_grad()
            for turn in (0, 1):
                with sync.no_sync():
                    loss_of(sync.model, rank, turn).backward()
            loss_of(sync.model, rank, 2).backward()
        return gradients(sync.model)

    for found in on_ranks(name, loop, **options):
        assert_gradients(found, mean_gradients(0, 1, 2))


@every_strategy
def test_gradients_can_be_seen_under_no_sync(name: str) -> None:
    """As with DDP: loops look at them, clip or drop them between micro-batches."""

    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        with sync.no_sync():
            loss_of(sync.model, rank, 0).backward()
            for parameter in sync.reducer.parameters:
                assert parameter.grad is not None
                with torch.no_grad():
                    parameter.grad.mul_(0.5)
        loss_of(sync.model, rank, 1).backward()
        return gradients(sync.model)

    half, whole = mean_gradients(0), mean_gradients(1)
    for found in on_ranks(name, loop):
        assert_gradients(found, {key: half[key] / 2 + whole[key] for key in half})


@every_strategy
def test_no_sync_sends_nothing(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> int:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        sync = replicate(nn.Linear(6, 6), sync=name, comm=comm)
        before = comm.operations.total()
        for turn in range(3):
            with sync.no_sync():
                loss_of(sync.model, rank, turn).backward()
        sent = comm.operations.total() - before
        sync.close()
        return sent

    assert run_thread_ranks(work, 2) == [0, 0]


@every_strategy
@pytest.mark.parametrize("by", ["step", "finish"])
def test_a_step_right_after_no_sync_synchronises(name: str, by: str) -> None:
    """The partial last window: torch's DDP would step with local gradients, and drift apart."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor | None]:
        for turn in (0, 1):
            with sync.no_sync():
                loss_of(sync.model, rank, turn).backward()
        if by == "finish":
            sync.finish()
        optimizer.step()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(0, 1))


@every_strategy
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_throws_away_what_no_sync_added(name: str, set_to_none: bool) -> None:
    """A loop that skips a bad micro-batch: what was cleared must not come back."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor | None]:
        with sync.no_sync():
            loss_of(sync.model, rank, 0).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(sync.model, rank, 1).backward()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(1))


@every_strategy
def test_no_sync_after_the_forward_is_named(name: str) -> None:
    def loop(rank: int, sync: GradientSync, _: Any) -> list[str]:
        messages = []
        loss = loss_of(sync.model, rank)
        with sync.no_sync(), pytest.raises(ConfigError) as caught:
            loss.backward()
        messages.append(str(caught.value))
        with sync.no_sync():
            loss = loss_of(sync.model, rank)
        with pytest.raises(ConfigError) as caught:
            loss.backward()
        messages.append(str(caught.value))
        return messages

    for late, early in on_ranks(name, loop):
        assert late.startswith("no_sync() was entered after the forward: enclose forward and back")
        assert early.startswith("no_sync() was entered around the forward only: enclose forward ")


@every_strategy
def test_require_backward_grad_sync(name: str) -> None:
    """As torch's DDP has it: before the forward it says what no_sync says."""

    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        assert sync.require_backward_grad_sync
        sync.require_backward_grad_sync = False
        for turn in (0, 1):
            loss_of(sync.model, rank, turn).backward()
        with sync.no_sync():
            assert not sync.require_backward_grad_sync
        assert not sync.require_backward_grad_sync
        sync.require_backward_grad_sync = True
        loss_of(sync.model, rank, 2).backward()
        found = gradients(sync.model)
        loss = loss_of(sync.model, rank, 3)
        sync.require_backward_grad_sync = False
        with pytest.raises(ConfigError, match="set require_backward_grad_sync before the forward"):
            loss.backward()
        return found

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(0, 1, 2))


@every_strategy
def test_evaluation_between_does_not_count_as_a_forward(name: str) -> None:
    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        loss = loss_of(sync.model, rank)
        with sync.no_sync(), torch.no_grad():
            sync.model(x_of(rank))
        loss.backward()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(0))


@every_strategy
def test_no_sync_ends_with_an_exception(name: str) -> None:
    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        with pytest.raises(KeyError), sync.no_sync():
            raise KeyError
        loss_of(sync.model, rank).backward()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(0))


# -- gradients that are not finite ----------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("handle", [False, True])
def test_a_gradient_that_is_not_finite_is_said_by_its_rank(
    name: str, handle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(rank: int, sync: GradientSync, optimizer: torch.optim.Optimizer) -> None:
        for turn in range(3):
            loss = loss_of(sync.model, rank, turn)
            if (rank, turn) == (1, 1):  # from the next step on all ranks have nan
                loss = loss * float("nan")
            if handle:
                sync.backward(loss, weight=1)
                sync.step(optimizer)
            else:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    caplog.set_level(logging.WARNING, logger="gradsync")
    on_ranks(name, loop)
    said = sorted(r.getMessage() for r in caplog.records if "nan or inf" in r.getMessage())
    assert all(text.endswith("every rank gets it with the next sum or average") for text in said)
    assert [text.partition(":")[0] for text in said] == [
        *("rank 0, step 3", "rank 1, step 2", "rank 2, step 3")
    ]
    names = [name for name, p in start().named_parameters() if p.requires_grad]
    assert any(name in said[1] for name in names)
    assert "(" in said[1]
