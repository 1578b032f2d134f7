"""Users' own loops, `loss.backward()` and `optimizer.step()`, on ranks that start differently."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from support.engine_cases import global_random_state
from support.recording import RecordingCommunicator
from support.sync_cases import SmallNet
from support.thread_ranks import run_thread_ranks

WORLD_SIZE = 3
every_strategy = pytest.mark.parametrize("name", ["invariant", "bucketed", "naive"])

Loop = Callable[[int, GradientSync, Any], Any]
"""(rank, handle, an SGD over all of the model's parameters) -> result."""
Gradients = dict[str, Tensor | None]


def loss_of(model: nn.Module, rank: int, turn: int = 0, **named: Any) -> Tensor:
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * turn + rank))
    return model(x, **named).square().mean()


def start(seed: int = 0) -> SmallNet:
    with global_random_state:
        torch.manual_seed(seed)
        return SmallNet(branch=True)


def on_ranks(name: str, loop: Loop, *, lr: float = 0.1, **options: Any) -> list[Any]:
    def work(rank: int, group: dist.ProcessGroup) -> Any:
        model = start(rank)
        sync = replicate(model, strategy=name, comm=ProcessGroupCommunicator(group), **options)
        try:
            return loop(rank, sync, torch.optim.SGD(model.parameters(), lr=lr))
        finally:
            sync.close()

    return run_thread_ranks(work, WORLD_SIZE)


def gradients(model: nn.Module) -> Gradients:
    return {
        name: None if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def mean_gradients(*turns: int, users: tuple[int, ...] = (0, 1, 2)) -> Gradients:
    """DDP's gradients: the sum over `turns`, averaged over all ranks; others bring zeros."""
    model = start()
    for rank in users:
        for turn in turns:
            (loss_of(model, rank, turn) / WORLD_SIZE).backward()
    return gradients(model)


def own_gradients(rank: int) -> Gradients:
    """One rank's gradients of turn 0, not averaged."""
    model = start()
    loss_of(model, rank).backward()
    return gradients(model)


def assert_gradients(found: Gradients, expected: Gradients) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert found[name] is not None, name
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_replicas_equal(found: list[dict[str, Tensor]]) -> None:
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in other)


# -- the mean, whatever the loop does --------------------------------------------------------------


class Case(NamedTuple):
    """A loop with learning rate 0, and the turns whose mean it must find in `.grad`."""

    loop: Loop
    turns: tuple[int, ...]
    users: tuple[int, ...]
    """Ranks with a backward in the last step."""


LOOPS: dict[str, Case] = {}


def finds(*turns: int, users: tuple[int, ...] = (0, 1, 2)) -> Callable[[Loop], Loop]:
    def enter(loop: Loop) -> Loop:
        LOOPS[loop.__name__] = Case(loop, turns, users)
        return loop

    return enter


@finds(0)
def finishes_twice(rank: int, sync: GradientSync, _: Any) -> None:
    loss_of(sync.model, rank).backward()
    sync.finish()
    sync.finish()


@finds(0, 1, 2)
def never_clears(rank: int, sync: GradientSync, _: Any) -> None:
    """As DDP: `.grad` holds the mean of the first, and the mean of the second is added to it."""
    for turn in range(3):
        loss_of(sync.model, rank, turn).backward()


@finds(1)
def clears_what_no_sync_added(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """A loop that skips a bad micro-batch: what was cleared must not come back."""
    for set_to_none in (True, False):
        with sync.no_sync():
            loss_of(sync.model, rank, 0).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(sync.model, rank, 1).backward()
        if set_to_none:
            optimizer.zero_grad()


@finds(0, 1)
def steps_right_after_no_sync(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """The partial last window: torch's DDP would step with local gradients, and drift apart."""
    for turn in (0, 1):
        with sync.no_sync():
            loss_of(sync.model, rank, turn).backward()
    optimizer.step()


@finds(0, 1, 2)
def sets_the_flag_of_ddp(rank: int, sync: GradientSync, _: Any) -> None:
    """Before the forward `require_backward_grad_sync` says what `no_sync` says."""
    assert sync.require_backward_grad_sync
    sync.require_backward_grad_sync = False
    for turn in (0, 1):
        loss_of(sync.model, rank, turn).backward()
    with sync.no_sync():
        assert not sync.require_backward_grad_sync
    assert not sync.require_backward_grad_sync
    sync.require_backward_grad_sync = True
    loss_of(sync.model, rank, 2).backward()


@finds(0, 1)
def sets_the_flag_on_the_model(rank: int, sync: GradientSync, _: Any) -> None:
    """As scripts do that wrap in torch's DDP: gradients are this rank's own until it is True."""
    sync.model.require_backward_grad_sync = False
    loss_of(sync.model, rank, 0).backward()
    assert not sync.require_backward_grad_sync
    assert_gradients(gradients(sync.model), own_gradients(rank))
    with sync.no_sync():
        sync.model.require_backward_grad_sync = True
    assert sync.require_backward_grad_sync
    loss_of(sync.model, rank, 1).backward()


@finds(0)
def evaluates_in_between(rank: int, sync: GradientSync, _: Any) -> None:
    loss = loss_of(sync.model, rank)
    with sync.no_sync(), torch.no_grad():
        loss_of(sync.model, rank)
    loss.backward()


@finds(0)
def one_rank_calls_autograd_grad(rank: int, sync: GradientSync, _: Any) -> None:
    if rank == 2:
        torch.autograd.grad(loss_of(sync.model, rank), sync.model.inner.weight)
    loss_of(sync.model, rank).backward()


@finds(2, users=(0, 2))
def rank_1_has_no_backward(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """In the first step, and in a later one, perhaps after a step that all skipped."""
    for by, skips in product(("step", "finish"), (False, True)):
        for turn, users in enumerate(((0, 2), (0, 1, 2), (0, 2))):
            optimizer.zero_grad()
            if rank in users:
                loss_of(sync.model, rank, turn).backward()
            if by == "finish":
                sync.finish()
            if turn != 1 or not skips:
                optimizer.step()
            assert_gradients(gradients(sync.model), mean_gradients(turn, users=users))


@finds(2, users=(0, 2))
def rank_1_keeps_the_last_steps_gradients(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """It did not clear its gradients, since it had no backward to clear them for."""
    loss_of(sync.model, rank, 0).backward()
    optimizer.step()
    if rank != 1:
        optimizer.zero_grad()
        loss_of(sync.model, rank, 2).backward()
    optimizer.step()


@finds(0)
def steps_twice_with_the_same_gradients(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """No rank had a backward in between: then the last gradients are used again, as without us."""
    loss_of(sync.model, rank).backward()
    optimizer.step()
    optimizer.step()


@every_strategy
@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_the_mean(name: str, loop: str) -> None:
    def work(rank: int, sync: GradientSync, optimizer: Any) -> Gradients:
        LOOPS[loop].loop(rank, sync, optimizer)
        return gradients(sync.model)

    for found in on_ranks(name, work, lr=0.0):
        assert_gradients(found, mean_gradients(*LOOPS[loop].turns, users=LOOPS[loop].users))


@every_strategy
@pytest.mark.parametrize("overlap", [True, False])
def test_no_sync_adds_up(name: str, overlap: bool) -> None:
    """`.grad` can be looked at and changed meanwhile, as with DDP."""
    options = {} if name == "naive" else {"overlap": overlap, "bucket_mb": 1e-9}

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> Gradients:
        for _ in range(2):  # buckets are laid out anew after the first
            optimizer.zero_grad()
            for turn in (0, 1):
                with sync.no_sync():
                    loss_of(sync.model, rank, turn).backward()
            for parameter in sync.reducer.parameters:
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
            loss_of(sync.model, rank, 2).backward()
        return gradients(sync.model)

    half, whole = mean_gradients(0, 1), mean_gradients(2)
    for found in on_ranks(name, loop, **options):
        assert_gradients(found, {key: half[key] / 2 + whole[key] for key in half})


@every_strategy
@pytest.mark.parametrize(
    ("before", "after"), [(True, False), (False, True)], ids=["left too early", "entered too late"]
)
@pytest.mark.parametrize("where", ["handle", "model"])
def test_no_sync_must_be_entered_before_the_forward(
    name: str, before: bool, after: bool, where: str
) -> None:
    """`before` and `after` the forward, by the handle's flag or the model's."""

    def loop(rank: int, sync: GradientSync, _: Any) -> str:
        place = sync if where == "handle" else sync.model
        place.require_backward_grad_sync = not before
        loss = loss_of(sync.model, rank)
        place.require_backward_grad_sync = not after
        with pytest.raises(ConfigError) as caught:
            loss.backward()
        return str(caught.value)

    said = "around the forward only" if before else "after the forward"
    for found in on_ranks(name, loop):
        assert found.startswith(f"no_sync() was entered {said}: enclose forward and backward")


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@every_strategy
def test_create_graph(name: str) -> None:
    """Autograd then puts a new tensor into `.grad` instead of adding to the one that is there.

    Either the sums are right, or it is refused by name.
    """

    def loop(rank: int, sync: GradientSync, _: Any) -> Gradients | str:
        try:
            with sync.no_sync():
                loss_of(sync.model, rank, 0).backward(create_graph=True)
            loss_of(sync.model, rank, 1).backward(create_graph=True)
        except ConfigError as error:
            return str(error)
        found = gradients(sync.model)
        sync.model.zero_grad()  # breaks the cycle of which torch warns
        return found

    for found in on_ranks(name, loop):
        if isinstance(found, str):
            assert "create_graph" in found
        else:
            assert_gradients(found, mean_gradients(0, 1))


@every_strategy
def test_nothing_travels_twice(name: str) -> None:
    """Nothing is sent under `no_sync`, nor by `finish` or the step after a backward."""

    def work(rank: int, group: dist.ProcessGroup) -> list[int]:
        comm = RecordingCommunicator(ProcessGroupCommunicator(group))
        model = nn.Linear(6, 6)
        sync = replicate(model, strategy=name, comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        counts = []
        for turn in range(3):
            before = comm.operations.total()
            with sync.no_sync():
                loss_of(model, rank, turn).backward()
            counts.append(comm.operations.total() - before)
            loss_of(model, rank, turn).backward()
            before = comm.operations.total()
            sync.finish()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(comm.operations.total() - before)
        sync.close()
        return counts

    assert run_thread_ranks(work, 2) == [[0] * 6] * 2


# -- weights stay equal, whatever ranks do ---------------------------------------------------------

PROGRAMS: dict[str, Loop] = {}


def program(loop: Loop) -> Loop:
    PROGRAMS[loop.__name__] = loop
    return loop


@program
def uses_parameters_on_some_ranks(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """With `.grad` in every state."""
    for turn in range(6):
        loss_of(sync.model, rank, turn, use_branch=(rank + turn) % 3 == 0).backward()
        optimizer.step()
        if turn % 3:
            optimizer.zero_grad(set_to_none=turn % 2 == 0)


@program
def steps_before_the_first_backward(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """As some programs do for a scheduler's sake."""
    optimizer.step()
    sync.finish()
    assert all(g is None for g in gradients(sync.model).values())
    loss_of(sync.model, rank).backward()
    optimizer.step()


@program
def steps_another_models_optimizer(rank: int, sync: GradientSync, optimizer: Any) -> None:
    """On one rank alone: nothing may be sent, or it would wait."""
    other = nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    for turn in range(2):
        if rank == 1:
            other(torch.ones(1, 2)).sum().backward()
            foreign.step()
        loss_of(sync.model, rank, turn).backward()
        optimizer.step()
        optimizer.zero_grad()


@program
def calls_backward_in_a_closure(rank: int, sync: GradientSync, _: Any) -> None:
    """LBFGS calls it inside of its step, several times, alike on all ranks."""
    optimizer = torch.optim.LBFGS(sync.reducer.parameters, max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(sync.model, rank)
        loss.backward()
        total = loss.detach().clone()  # it needs the global loss, too
        sync.comm.all_reduce(total).wait()
        return total / WORLD_SIZE

    for _ in range(2):
        optimizer.step(closure)


@program
def steps_optimizers_on_schedules_of_their_own(rank: int, sync: GradientSync, _: Any) -> None:
    often = torch.optim.SGD(sync.model.branch.parameters(), lr=0.1)
    seldom = torch.optim.SGD(sync.model.inner.parameters(), lr=0.1)
    for step in range(2):
        if (rank, step) != (1, 1):
            loss_of(sync.model, rank, step).backward()
        if step == 1:
            seldom.step()
        often.step()
        often.zero_grad()
        seldom.zero_grad()


@every_strategy
@pytest.mark.parametrize("loop", PROGRAMS)
def test_replicas_stay_equal(name: str, loop: str) -> None:
    def work(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor]:
        PROGRAMS[loop](rank, sync, optimizer)
        return weights(sync.model)

    found = on_ranks(name, work)
    assert_replicas_equal(found)
    assert not torch.equal(found[0]["branch.weight"], start().branch.weight)


@every_strategy
def test_a_gradient_scaler(name: str) -> None:
    """One rank overflows in step 1: then all skip it, halve the scale, and go on alike."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> tuple[dict[str, Tensor], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for turn in range(3):
            optimizer.zero_grad()
            factor = float("inf") if (rank, turn) == (1, 1) else 1.0
            scaler.scale(loss_of(sync.model, rank, turn) * factor).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(sync.model.parameters(), 1.0)
            before = sync.model.branch.weight.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, sync.model.branch.weight) == (turn == 1)
        return weights(sync.model), scaler.get_scale()

    found = on_ranks(name, loop)
    assert_replicas_equal([weights for weights, _ in found])
    assert [scale for _, scale in found] == [512.0] * WORLD_SIZE


@every_strategy
def test_a_handles_own_step_after_a_loop(name: str) -> None:
    """`sync.backward` and `sync.step` then work as if they were alone."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> Gradients:
        loss_of(sync.model, rank, 0).backward()
        optimizer.zero_grad()
        seen: list[Gradients] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(sync.model)))
        sync.backward(loss_of(sync.model, rank, 1), weight=1, reduction="sum")
        sync.step(optimizer)
        return seen[-1]

    for found in on_ranks(name, loop):
        assert_gradients(found, mean_gradients(1))


def clips(model: nn.Module, max_norm: float = 0.01) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def clips_past_the_counters(model: nn.Module) -> None:
    for gradient in (p.grad for p in model.parameters()):
        if gradient is not None:
            gradient.data.clamp_(-1e-3, 1e-3)


def drops(model: nn.Module) -> None:
    model.branch.zero_grad()


@every_strategy
@pytest.mark.parametrize("change", [clips, clips_past_the_counters, drops])
def test_gradients_that_one_rank_could_not_change(name: str, change: Any) -> None:
    """Rank 1 has no backward, so its gradients come in the optimizer's step: after the change."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> tuple[str, bool]:
        for turn in range(3):
            if (rank, turn) != (1, 2):
                loss_of(sync.model, rank, turn).backward()
            change(sync.model)
            before = weights(sync.model)
            try:
                optimizer.step()
            except ConfigError as error:
                assert turn == 2
                return str(error), torch.equal(before["inner.weight"], sync.model.inner.weight)
            optimizer.zero_grad()
        return "", False

    first, without, last = on_ranks(name, loop)
    assert without == ("", False)
    for said, kept in (first, last):
        assert "changed between loss.backward() and optimizer.step()" in said
        assert "call sync.finish() before it, on all ranks" in said
        assert kept


@every_strategy
@pytest.mark.parametrize("finishes", [True, False])
def test_gradients_that_every_rank_could_change(name: str, finishes: bool) -> None:
    """By a `finish` before the clipping; or the clipping changes nothing; or all step alike."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor]:
        for turn in range(4):
            if turn == 3 and not finishes:
                with sync.no_sync():  # and all ranks synchronise in the step
                    loss_of(sync.model, rank, turn).backward()
            elif (rank, turn) != (1, 1):
                loss_of(sync.model, rank, turn).backward()
            if finishes:
                sync.finish()
            clips(sync.model, max_norm=0.01 if finishes else 1e3)
            optimizer.step()
            optimizer.zero_grad()
        return weights(sync.model)

    assert_replicas_equal(on_ranks(name, loop))


@every_strategy
@pytest.mark.parametrize("goes_on", ["by the next step", "by its own step"])
def test_a_forward_that_failed_on_one_rank(name: str, goes_on: str) -> None:
    """`discard` comes before any backward of the step. Rank 2 had none in the step before."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> dict[str, Tensor]:
        for turn in range(5):
            if (rank, turn) == (1, 2):
                sync.discard()
            elif (rank, turn) != (2, 1):
                loss_of(sync.model, rank, turn).backward()
            if (rank, turn) != (1, 2) or goes_on == "by its own step":
                optimizer.step()
            optimizer.zero_grad()
        return weights(sync.model)

    found = on_ranks(name, loop)
    assert_replicas_equal(found)
    model = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for turn in (0, 1, 3, 4):
        optimizer.zero_grad()
        for rank in (0, 1) if turn == 1 else range(WORLD_SIZE):
            (loss_of(model, rank, turn) / WORLD_SIZE).backward()
        optimizer.step()
    for key, expected in weights(model).items():
        torch.testing.assert_close(found[0][key], expected, rtol=1e-5, atol=1e-6)


# -- several models --------------------------------------------------------------------------------


@every_strategy
def test_models_take_part_in_the_order_of_their_handles(name: str) -> None:
    """One rank has no backward: its one optimizer takes part for four models."""

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        junk = [object() for _ in range(1000 * rank)]
        comm = ProcessGroupCommunicator(group)
        models = nn.ModuleList(nn.Linear(4 + i, 3) for i in range(4))
        handles = [replicate(model, strategy=name, comm=comm) for model in models]
        optimizer = torch.optim.SGD(models.parameters(), lr=0.1)
        for _ in range(2):
            if rank == 0:
                for i, model in enumerate(models):
                    model(torch.ones(2, 4 + i)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for handle in handles:
            handle.close()
        del junk
        return weights(models)

    assert_replicas_equal(run_thread_ranks(work, 2))


def test_gradients_are_not_swapped_between_models() -> None:
    """Ranks that go through two models in different orders would add one's to the other's."""

    def work(rank: int, group: dist.ProcessGroup) -> None:
        comm = ProcessGroupCommunicator(group)
        models = [nn.Linear(3, 3) for _ in range(2)]
        handles = [replicate(model, strategy="bucketed", comm=comm) for model in models]
        try:
            with pytest.raises(RunError, match="ranks synchronise different models"):
                models[rank](torch.ones(4, 3)).sum().backward()
        finally:
            for handle in handles:
                handle.close()

    run_thread_ranks(work, 2)


# -- what is refused, and what is said -------------------------------------------------------------


@every_strategy
def test_parts_of_a_container_that_is_gone_stay_synchronised(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        first, second = nn.Linear(3, 3), nn.Linear(3, 2)
        replicate(
            nn.ModuleList([first, second]), strategy=name, comm=ProcessGroupCommunicator(group)
        )
        gc.collect()
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        second(first(torch.full((4, 3), rank + 1.0))).square().sum().backward()
        optimizer.step()
        first._gradsync.close()
        return weights(first)

    assert_replicas_equal(run_thread_ranks(work, 2))


@every_strategy
@pytest.mark.parametrize("leaves", [(2, 2, 1), (2, 2, 0), (1, 2, 3)])
def test_a_backward_for_each_leaf_where_shares_are_uneven(
    name: str, leaves: tuple[int, ...]
) -> None:
    """Each is one synchronisation: those of different steps would meet."""

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> str:
        try:
            for step in range(4):
                for leaf in range(leaves[rank]):
                    loss_of(sync.model, rank, 10 * step + leaf).backward()
                sync.finish()
                optimizer.step()
                optimizer.zero_grad()
        except ConfigError as error:
            return str(error)
        return ""

    for said in on_ranks(name, loop):
        assert said.startswith("number of optimizer.step() since the last synchronisation differs:")
        assert "enclose all micro-batches of a step but the last in sync.no_sync()" in said


@pytest.mark.parametrize("name", ["zero1", "zero2", "local_sgd", "diloco"])
def test_a_strategy_that_cannot_is_refused_before_ranks_drift(name: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> str:
        model = nn.Linear(2, 1)
        sync = replicate(model, strategy=name, comm=ProcessGroupCommunicator(group))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        with pytest.raises(ConfigError, match=f"strategy='{name}' works through sync.backward"):
            sync.require_backward_grad_sync = False
        with pytest.raises(ConfigError, match=r"sync.step\(optimizer\) needs sync.backward"):
            sync.step(optimizer)  # which would update nothing, for want of a weight
        sync.close()
        optimizer.step()  # plain torch again
        return str(caught.value)

    for message in run_thread_ranks(work, 2):
        assert f"strategy='{name}' works through sync.backward and sync.step only" in message


@every_strategy
@pytest.mark.parametrize("handle", [False, True])
def test_a_gradient_that_is_not_finite_is_said_by_its_rank(
    name: str, handle: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def loop(rank: int, sync: GradientSync, optimizer: Any) -> None:
        for turn in range(3):
            loss = loss_of(sync.model, rank, turn)
            if (rank, turn) == (1, 1):  # from the next step on all ranks have nan
                loss = loss * float("nan")
            if handle:
                sync.backward(loss, weight=1, reduction="sum")
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
    assert any(name in said[1] for name in gradients(start()))
    assert "(" in said[1]


@every_strategy
def test_a_gradient_that_is_not_finite_though_its_loss_is(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes into being in backward, and reaches the biases of the layers before."""

    def poison(_: nn.Module, inputs: Any, out: Tensor) -> None:
        out.register_hook(lambda gradient: gradient * float("nan"))

    def loop(rank: int, sync: GradientSync, optimizer: Any) -> None:
        for turn in range(2):
            hook: Any = sync.model.inner
            hook = hook.register_forward_hook(poison) if rank == turn == 1 else None
            with sync.micro_step(last=True):  # buckets leave while backward runs
                sync.backward(loss_of(sync.model, rank, turn), weight=1, reduction="sum")
            if hook is not None:
                hook.remove()
            sync.step(optimizer)

    caplog.set_level(logging.WARNING, logger="gradsync")
    on_ranks(name, loop)
    said = [r.getMessage() for r in caplog.records if "nan or inf" in r.getMessage()]
    assert [text.partition(" gradient of ")[0] for text in said] == [
        "rank 1, step 2: nan or inf in this rank's"
    ]
    assert "inner.bias" in said[0]
