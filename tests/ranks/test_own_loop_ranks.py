"""Loops of one's own on ranks that do different things, and with other optimizers."""

from __future__ import annotations

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
    WORLD_SIZE,
    assert_gradients,
    assert_replicas_equal,
    gradients,
    loss_of,
    mean_gradients,
    on_ranks,
    start,
    weights,
)
from support.thread_ranks import run_thread_ranks

every_strategy = pytest.mark.parametrize("name", OWN_LOOP)


# -- ranks that do different things ---------------------------------------------------------------


@every_strategy
@pytest.mark.parametrize("by", ["step", "finish"])
def test_a_rank_without_a_backward_takes_part(name: str, by: str) -> None:
    """In the first step, and in a later one with the last step's gradients still there."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> list[dict[str, Tensor | None]]:
        found = []
        for step in range(3):
            if rank != 1 or step == 1:
                loss_of(sync.model, rank, step).backward()
            if by == "finish":
                sync.finish()
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.step()
            found.append(gradients(sync.model))
            optimizer.zero_grad()
        return found

    for found in on_ranks(name, loop):
        assert_gradients(found[0], mean_gradients(0, users=(0, 2)))
        assert_gradients(found[1], mean_gradients(1))
        assert_gradients(found[2], mean_gradients(2, users=(0, 2)))


@every_strategy
def test_no_rank_has_a_backward(name: str) -> None:
    """Some programs step once before the first backward, for a scheduler's sake."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor]:
        optimizer.step()
        sync.finish()
        assert all(g is None for g in gradients(sync.model).values())
        loss_of(sync.model, rank).backward()
        optimizer.step()
        return weights(sync.model)

    assert_replicas_equal(on_ranks(name, loop))


@every_strategy
def test_two_optimizers(name: str) -> None:
    """Over parts of the model, stepped one after the other; rank 1 has no data in step 1."""

    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor]:
        branch = torch.optim.SGD(sync.model.branch.parameters(), lr=0.1)
        rest = torch.optim.SGD([sync.model.inner.weight, sync.model.inner.bias], lr=0.1)
        for step in range(4):
            if rank != 1 or step != 1:
                loss_of(sync.model, rank, step).backward()
            for optimizer in (branch, rest) if step % 2 else (rest, branch):
                optimizer.step()
            branch.zero_grad()
            rest.zero_grad()
        return weights(sync.model)

    model = start()
    for step in range(4):
        for rank in (0, 2) if step == 1 else range(WORLD_SIZE):
            (loss_of(model, rank, step) / WORLD_SIZE).backward()
        with torch.no_grad():
            for p in (*model.branch.parameters(), *model.inner.parameters()):
                p.sub_(0.1 * p.grad)
        model.zero_grad()
    found = on_ranks(name, loop)
    assert_replicas_equal(found)
    for key, expected in weights(model).items():
        torch.testing.assert_close(found[0][key], expected, rtol=1e-5, atol=1e-6)


@every_strategy
def test_an_optimizer_of_somebody_else(name: str) -> None:
    """One rank steps another model's optimizer, alone: nothing may be sent, or it would wait."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor]:
        other = nn.Linear(2, 2)
        foreign = torch.optim.SGD(other.parameters(), lr=0.1)
        for turn in range(2):
            if rank == 1:
                other(torch.ones(1, 2)).sum().backward()
                foreign.step()
            loss_of(sync.model, rank, turn).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(sync.model)

    assert_replicas_equal(on_ranks(name, loop))


@every_strategy
def test_gradients_by_autograd_grad_are_left_alone(name: str) -> None:
    """`torch.autograd.grad` fills no `.grad`: one rank may call it alone."""

    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        if rank == 2:
            torch.autograd.grad(loss_of(sync.model, rank), sync.model.inner.weight)
        loss_of(sync.model, rank).backward()
        return gradients(sync.model)

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(0))


@every_strategy
def test_a_gradient_scaler(name: str) -> None:
    """One rank overflows in step 1: then all skip it, halve the scale, and go on alike."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> tuple[dict[str, Tensor], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        before = {}
        for turn in range(3):
            optimizer.zero_grad()
            factor = float("inf") if (rank, turn) == (1, 1) else 1.0
            scaler.scale(loss_of(sync.model, rank, turn) * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(sync.model.parameters(), 1.0)
            before = weights(sync.model)
            scaler.step(optimizer)
            scaler.update()
            changed = not torch.equal(before["branch.weight"], sync.model.branch.weight)
            assert changed == (turn != 1)
        return weights(sync.model), scaler.get_scale()

    found = on_ranks(name, loop)
    assert_replicas_equal([weights for weights, _ in found])
    assert [scale for _, scale in found] == [512.0] * WORLD_SIZE


@every_strategy
def test_an_optimizer_with_a_closure(name: str) -> None:
    """LBFGS calls backward inside of its step, several times, alike on all ranks."""

    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor]:
        optimizer = torch.optim.LBFGS(sync.reducer.parameters, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(sync.model, rank)
            loss.backward()
            # Its line of thought needs the global loss, too.
            total = loss.detach().clone()
            sync.comm.all_reduce(total).wait()
            return total / WORLD_SIZE

        for _ in range(2):
            optimizer.step(closure)
        return weights(sync.model)

    found = on_ranks(name, loop)
    assert_replicas_equal(found)
    assert not torch.equal(found[0]["branch.weight"], start().branch.weight)


@every_strategy
def test_mixing_with_the_handles_own_step(name: str) -> None:
    """`sync.backward` and `sync.step` after a loop of one's own: each as if it were alone."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor | None]:
        loss_of(sync.model, rank, 0).backward()
        optimizer.zero_grad()
        seen: list[dict[str, Tensor | None]] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(sync.model)))
        sync.backward(loss_of(sync.model, rank, 1), weight=1)
        sync.step(optimizer)
        return seen[-1]

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(1))


@pytest.mark.parametrize("name", ["flat", "overlap", "ring", "bf16", "fp16"])
def test_every_engine_strategy_serves_own_loops(name: str) -> None:
    def loop(rank: int, sync: GradientSync, _: Any) -> dict[str, Tensor | None]:
        loss_of(sync.model, rank).backward()
        return gradients(sync.model)

    tolerance = {"bf16": 2**-7, "fp16": 2**-9}.get(name, 1e-5)
    expected = mean_gradients(0)
    for found in on_ranks(name, loop):
        for key, gradient in expected.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(found[key], gradient, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("name", ["zero1", "zero2", "local_sgd", "diloco"])
def test_a_strategy_that_cannot_is_refused_before_ranks_drift(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = nn.Linear(2, 1)
        sync = replicate(model, sync=name, comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        with pytest.raises(ConfigError, match=f"sync='{name}' works through sync.backward"):
            sync.require_backward_grad_sync = False
        with pytest.raises(ConfigError, match=r"sync.step\(optimizer\) follows sync.backward"):
            sync.step(optimizer)  # which would update nothing, for want of a weight
        sync.close()
        optimizer.step()  # nobody's any more
        return str(caught.value)

    for message in run_thread_ranks(work, 2):
        assert f"sync='{name}' works through sync.backward and sync.step only" in message
