"""`local_sgd` and `diloco` on ranks as threads, against W replicas in plain loops.

The oracle knows no communicator and no reducer: replicas are a list, the mean is a sum over it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.options import DilocoOptions, LocalSgdOptions
from gradsync.sync.periodic import PeriodicReducer, PeriodicReplicas
from gradsync.sync.reducer import NaiveReducer
from gradsync.sync.step import Optimizers, StepResult
from support.recording import RecordingCommunicator
from support.thread_ranks import run_thread_ranks

KINDS: dict[str, Any] = {"local_sgd": LocalSgdOptions, "diloco": DilocoOptions}
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True)
class Shares:
    """Shares of leaves: rank r has leaves r, r + W, …, of which some are all padding."""

    num_leaves: int
    padding: tuple[int, ...] = ()

    def of(self, rank: int, world_size: int) -> list[int]:
        return list(range(rank, self.num_leaves, world_size))

    def weight(self, index: int) -> int:
        return 0 if index in self.padding else 2 + index % 3


EVEN = Shares(num_leaves=12)
UNEVEN = Shares(num_leaves=5, padding=(1,))
ONE_RANK_ONLY = Shares(num_leaves=1)


def small_model() -> nn.Module:
    """Two layers, one frozen parameter, no buffers."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(7)  # ranks are threads: no global seed
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    model[0].bias.requires_grad_(False)
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(trained(model), lr=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(trained(model), lr=0.03, weight_decay=0.1)


def leaf_loss(model: nn.Module, step: int, index: int, shares: Shares) -> Tensor:
    """The leaf's loss, summed over its samples; 0 for padding."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    x_BC = torch.randn(2 + index % 3, 5, generator=generator)
    loss = (model(x_BC) - x_BC[:, :3]).square().sum()
    return loss if shares.weight(index) else 0.0 * loss


def handle(kind: str, comm: Communicator, wire: Any = None, **options: Any) -> GradientSync:
    """Handle of a new model; `wire` is what the strategy alone communicates by."""
    model = small_model()
    reducer = PeriodicReducer(model, comm, KINDS[kind](**options))
    reducer.shards.comm = wire or comm
    return GradientSync(model, comm, reducer)


def train(
    sync: GradientSync, optimizer: Optimizers, steps: Sequence[int], shares: Shares
) -> list[StepResult]:
    """A user's loop, on one rank."""
    results = []
    for step in steps:
        for index in shares.of(sync.comm.rank, sync.comm.world_size):
            loss = leaf_loss(sync.model, step, index, shares)
            sync.backward(loss, weight=shares.weight(index), reduction="sum")
        results.append(sync.step(optimizer))
    return results


def weights_after(
    sync: GradientSync, make_optimizer: Any, steps: int, shares: Shares
) -> dict[str, Tensor]:
    """Train, end the last round, and return the weights."""
    train(sync, make_optimizer(sync.model), range(steps), shares)
    sync.synchronize_replicas()
    return weights_of(sync.model)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def on_ranks(work: Callable[[Communicator], Any], world_size: int) -> list[Any]:
    return run_thread_ranks(lambda _, group: work(ProcessGroupCommunicator(group)), world_size)


# -- the oracle ------------------------------------------------------------------------------------


def step_alone(
    model: nn.Module, optimizer: Optimizer, step: int, leaves: Sequence[int], shares: Shares
) -> None:
    """One step of one replica on the mean gradient of its own leaves, if it has any."""
    weight = sum(shares.weight(index) for index in leaves)
    for index in leaves:
        leaf_loss(model, step, index, shares).backward()
    if weight:
        for parameter in trained(model):
            assert parameter.grad is not None
            parameter.grad.mul_(1 / weight)
        optimizer.step()
    optimizer.zero_grad()


def average(replicas: list[nn.Module], memory: dict[str, Any]) -> None:
    """Added up in rank order."""
    for name, _ in replicas[0].named_parameters():
        total = torch.zeros(())
        for replica in replicas:
            total = total + replica.get_parameter(name).detach()
        for replica in replicas:
            replica.get_parameter(name).data.copy_(total / len(replicas))


def outer_step(replicas: list[nn.Module], memory: dict[str, Any]) -> None:
    """Algorithm 1's lines 11 to 14, Nesterov momentum written out as torch's SGD defines it."""
    start: nn.Module = memory["start"]
    for name, theta in start.named_parameters():
        if not theta.requires_grad:
            continue
        delta = torch.zeros(())
        for replica in replicas:
            delta = delta + (theta.detach() - replica.get_parameter(name).detach())
        delta = delta / len(replicas)
        before = memory.get(name)
        memory[name] = momentum = delta if before is None else before * OUTER_MOMENTUM + delta
        theta.data.sub_(OUTER_LR * (delta + OUTER_MOMENTUM * momentum))
        for replica in replicas:
            replica.get_parameter(name).data.copy_(theta.detach())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(
    ("inner_steps", "make_optimizer", "shares"),
    [(1, sgd, EVEN), (2, adamw, UNEVEN), (3, adamw, ONE_RANK_ONLY), (9, sgd, UNEVEN)],
)
@every_kind
def test_equals_replicas_in_plain_loops(
    kind: str, inner_steps: int, make_optimizer: Any, shares: Shares, world_size: int
) -> None:
    """Seven steps: up to seven meetings, so that momentum counts; most last rounds are short."""
    meet = {"local_sgd": average, "diloco": outer_step}[kind]
    replicas = [small_model() for _ in range(world_size)]
    optimizers = [make_optimizer(replica) for replica in replicas]
    memory: dict[str, Any] = {"start": copy.deepcopy(replicas[0])}
    for step in range(7):
        for rank, (replica, optimizer) in enumerate(zip(replicas, optimizers, strict=True)):
            step_alone(replica, optimizer, step, shares.of(rank, world_size), shares)
        if (step + 1) % inner_steps == 0 or step == 6:
            meet(replicas, memory)
    results = on_ranks(
        lambda comm: weights_after(
            handle(kind, comm, inner_steps=inner_steps), make_optimizer, 7, shares
        ),
        world_size,
    )
    for result in results:
        for name, tensor in weights_of(replicas[0]).items():
            assert torch.equal(result[name], results[0][name]), name
            torch.testing.assert_close(result[name], tensor, rtol=1e-5, atol=1e-6)
            if kind == "local_sgd" and world_size <= 2:  # a sum of two has one order only
                assert torch.equal(result[name], tensor), name


@pytest.mark.parametrize("world_size", [2, 4])  # not 3: leaves have 2, 3 and 4 samples in turn
@every_kind
def test_special_cases_are_other_strategies(kind: str, world_size: int) -> None:
    """One inner step of SGD on equal shares is synchronous SGD; a plain outer step of rate 1 is an
    average."""
    shares = Shares(num_leaves=3 * world_size)

    def work(comm: Communicator) -> list[dict[str, Tensor]]:
        if kind == "local_sgd":
            sync = handle(kind, comm, inner_steps=1)
            model = small_model()
            naive = GradientSync(model, comm, NaiveReducer(model, comm))
            return [weights_after(each, sgd, 3, shares) for each in (sync, naive)]
        sync = handle(kind, comm, inner_steps=2, outer_lr=1.0, outer_momentum=0.0)
        averaged = handle("local_sgd", comm, inner_steps=2)
        return [weights_after(each, adamw, 5, UNEVEN) for each in (sync, averaged)]

    for found, expected in on_ranks(work, world_size):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@every_kind
def test_traffic_is_the_weights_once_a_round(kind: str) -> None:
    """Seven steps, three a round: two meetings, and a third when the run settles."""

    def work(comm: Communicator) -> tuple[list[int], int]:
        counted = RecordingCommunicator(comm)
        sync = handle(kind, comm, counted, inner_steps=3)
        optimizer = adamw(sync.model)
        operations = []
        for step in range(7):
            train(sync, optimizer, [step], UNEVEN)
            operations.append(counted.operations.total())
        sync.synchronize_replicas()
        sync.synchronize_replicas()  # nothing more to do
        operations.append(counted.operations.total())
        return operations, counted.tensor_bytes["all_reduce"]

    elements = sum(p.numel() for p in trained(small_model()))
    assert on_ranks(work, 2) == [([0, 0, 1, 1, 1, 2, 2, 3], 3 * 4 * elements)] * 2


def test_what_a_step_tells() -> None:
    """The loss is the global mean; the reading is of this step's own communication."""

    def work(comm: Communicator) -> list[tuple[float, float, bool]]:
        sync = handle("local_sgd", comm, inner_steps=2)
        results = train(sync, sgd(sync.model), range(4), UNEVEN)
        return [(float(r.mean_loss), r.weight, r.exposed.seconds() > 0) for r in results]

    first, second = on_ranks(work, 2)
    assert [step[:2] for step in first] == [step[:2] for step in second]
    assert {weight for _, weight, _ in first} == {2 + 4 + 2 + 3}
    assert [met for _, _, met in first] == [False, True, False, True]


@every_kind
def test_a_state_dict_in_mid_round_says_whose_weights_it_holds(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def work(comm: Communicator) -> None:
        sync = handle(kind, comm, inner_steps=3)
        sync.model.state_dict()  # ranks are equal
        train(sync, sgd(sync.model), range(2), EVEN)
        if comm.rank == 1:
            sync.model.state_dict()
            sync.model.state_dict()  # said once
        copy.deepcopy(sync.model).state_dict()
        sync.replica.full_weights()
        sync.model.state_dict()
        sync.close()

    on_ranks(work, 2)
    found = [each for each in caplog.messages if "holds rank" in each]
    assert len(found) == 1
    assert found[0].startswith(
        "model.state_dict() holds rank 1's own weights here, 2 steps after ranks last met (they "
        "meet every 3): call sync.synchronize_replicas() on all ranks before it"
    )


# -- buffers, memory, half precision ---------------------------------------------------------------


def test_buffers_are_averaged_and_counters_are_rank_0s() -> None:
    """Half precision is rounded once, not at each addition."""

    def values(rank: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        return {
            "running": torch.full((3,), float(rank)),
            "count": torch.tensor(10 + rank),
            "coarse": torch.randn(64, generator=generator).bfloat16(),
        }

    def work(comm: Communicator) -> nn.Module:
        model = nn.Linear(2, 1)
        for name, value in values(comm.rank).items():
            model.register_buffer(name, torch.zeros_like(value))
        model.register_buffer("table", torch.linspace(0, 1, 40))
        shards = PeriodicReplicas(model, comm, LocalSgdOptions(inner_steps=1))
        for name, value in values(comm.rank).items():
            model.get_buffer(name).copy_(value)  # what training made of them on this rank
        shards.publish()
        return model

    coarse = torch.stack([values(rank)["coarse"].float() for rank in range(4)]).mean(dim=0)
    for model in on_ranks(work, 4):
        assert model.running.tolist() == [1.5] * 3
        assert torch.equal(model.coarse, coarse.bfloat16())
        assert int(model.count) == 10
        # No rank did: its bits stay (the mean of three equal numbers is another one in 17 %).
        assert torch.equal(model.table, torch.linspace(0, 1, 40))


def test_half_precision_weights_meet_in_fp32() -> None:
    """The outer gradient of bf16 weights is not rounded before it is averaged."""

    def work(comm: Communicator) -> float:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        model.weight.data.fill_(1.0)
        shards = PeriodicReplicas(model, comm, DilocoOptions(outer_lr=1.0, outer_momentum=0.0))
        shards.begin_step()
        # 1 + 2^-7 and 1 + 3 * 2^-7: neighbours in bf16 are 2^-7 apart.
        model.weight.data.add_(2**-7 if comm.rank == 0 else 3 * 2**-7)
        shards.publish()
        shards.synchronize_replicas()
        return model.weight.item()

    assert on_ranks(work, 2) == [1 + 2 * 2**-7] * 2


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "with_state"), [("local_sgd", True), ("diloco", True), ("diloco", False)]
)
def test_a_checkpoint_in_mid_round_resumes_to_the_same_bits(kind: str, with_state: bool) -> None:
    """It ends the round; the run that goes on and the run that resumes are the same. Without the
    outer momentum the test must see a difference."""

    def work(comm: Communicator) -> list[dict[str, Tensor]]:
        sync = handle(kind, comm, inner_steps=3)
        optimizer = adamw(sync.model)
        train(sync, optimizer, range(4), UNEVEN)
        sync.replica.gather(optimizer)
        weights, inner = weights_of(sync.model), copy.deepcopy(optimizer.state_dict())
        outer = {name: tensor.clone() for name, tensor in sync.replica.state_tensors().items()}
        sync.replica.scatter(optimizer)
        again = handle(kind, comm, inner_steps=3)
        optimizer_again = adamw(again.model)
        if kind == "diloco":
            again.model.load_state_dict(weights)  # past the reducer, as a checkpoint loader may
        else:
            again.replica.load_full_weights(weights)
        optimizer_again.load_state_dict(inner)
        again.replica.load_state_tensors(outer if with_state else {})
        train(sync, optimizer, range(4, 9), UNEVEN)
        train(again, optimizer_again, range(4, 9), UNEVEN)
        return [sync.replica.full_weights(), again.replica.full_weights()]

    results = on_ranks(work, 3)
    for went_on, resumed in results:
        assert all(torch.equal(went_on[name], results[0][0][name]) for name in went_on)
        assert all(torch.equal(went_on[name], resumed[name]) for name in went_on) is with_state


def test_a_checkpoint_gives_rank_0s_memory_to_all() -> None:
    """Also where another rank has state for a parameter and rank 0 has none."""

    def work(comm: Communicator) -> dict[str, Any]:
        model = small_model()
        optimizer = adamw(model)
        for step in range(1 + comm.rank):
            step_alone(model, optimizer, step, [[0], [], [1]][comm.rank], EVEN)
        if comm.rank == 0:
            del optimizer.state[model[2].bias]
        PeriodicReplicas(model, comm, LocalSgdOptions()).gather(optimizer)
        return optimizer.state_dict()["state"]

    first, *others = on_ranks(work, 3)
    assert first.keys() == {0, 1}
    assert float(first[0]["step"]) == 1
    for other in others:
        assert other.keys() == first.keys()
        for index, state in first.items():
            assert other[index].keys() == state.keys()
            assert all(torch.equal(other[index][name], state[name]) for name in state)


def test_outer_momentum_by_name() -> None:
    sync = handle("diloco", SingleCommunicator(), inner_steps=1)
    assert sync.replica.state_tensors() == {}  # no meeting yet
    train(sync, sgd(sync.model), [0], UNEVEN)
    saved = sync.replica.state_tensors()
    names = ("0.weight", "2.weight", "2.bias")  # the frozen one has none
    assert list(saved) == [f"outer_momentum/{name}" for name in names]
    assert saved["outer_momentum/0.weight"].shape == (4, 5)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("local_sgd", {"inner_steps": 0}, "inner_steps must be a whole number, at least 1; got 0"),
        ("diloco", {"inner_steps": 0}, "inner_steps must be a whole number, at least 1; got 0"),
        ("diloco", {"outer_lr": 0.0}, "outer_lr must be positive; got 0.0"),
    ],
)
def test_numbers_out_of_range(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        handle(kind, SingleCommunicator(), **options)
