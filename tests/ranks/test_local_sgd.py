"""`local_sgd` on ranks as threads, against W replicas in plain loops."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.naive import NaiveReducer
from gradsync.sync.periodic.local_sgd import LocalSgdReducer
from support.recording import RecordingCommunicator
from support.round_cases import (
    MakeOptimizer,
    Shares,
    adamw,
    check_rounds,
    mean_of,
    run_rounds,
    sgd,
    small_model,
    step_alone,
    train,
    weights_of,
)
from support.thread_ranks import run_thread_ranks

EVEN = Shares(num_leaves=12)
UNEVEN = Shares(num_leaves=5, padding=(1,))
ONE_RANK_ONLY = Shares(num_leaves=1)


def _average(replicas: list[nn.Module], memory: dict[str, Any]) -> None:
    for name, _ in replicas[0].named_parameters():
        mean = mean_of(replicas, name)
        for replica in replicas:
            replica.get_parameter(name).data.copy_(mean)


def _reducer(inner_steps: int, **options: Any) -> Any:
    return lambda model, comm: LocalSgdReducer(model, comm, inner_steps=inner_steps, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("inner_steps", "make_optimizer", "shares"),
    [(1, sgd, EVEN), (2, adamw, UNEVEN), (3, adamw, ONE_RANK_ONLY), (9, sgd, UNEVEN)],
)
def test_equals_replicas_in_plain_loops(
    world_size: int, inner_steps: int, make_optimizer: MakeOptimizer, shares: Shares
) -> None:
    """Five steps: with 2 and 3 inner steps the last round is short, with 9 the only one is."""
    check_rounds(
        world_size,
        _reducer(inner_steps),
        _average,
        make_optimizer,
        shares,
        steps=5,
        inner_steps=inner_steps,
        exact_up_to=2,  # a sum of two has one order only
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_one_inner_step_of_sgd_is_synchronous_sgd(world_size: int) -> None:
    """With three leaves a rank, of 2, 3 and 4 samples in some order, all ranks count alike."""
    shares = Shares(num_leaves=3 * world_size)

    def work(rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        comm = ProcessGroupCommunicator(group)
        model = small_model()
        naive = GradientSync(model, comm, NaiveReducer(model, comm))
        train(naive, sgd(model), range(3), shares)
        return run_rounds(comm, _reducer(1), sgd, 3, shares), weights_of(model)

    for local, synchronous in run_thread_ranks(work, world_size):
        for name, tensor in synchronous.items():
            torch.testing.assert_close(local[name], tensor, rtol=1e-5, atol=1e-6)


def test_traffic_is_the_weights_once_a_round() -> None:
    """Seven steps, three a round: two meetings, and a third when the run settles."""

    def work(rank: int, group: Any) -> tuple[list[int], int, int]:
        comm = ProcessGroupCommunicator(group)
        counted = RecordingCommunicator(comm)
        model = small_model()
        sync = GradientSync(model, comm, LocalSgdReducer(model, counted, inner_steps=3))
        optimizer = adamw(model)
        operations = []
        for step in range(7):
            train(sync, optimizer, [step], UNEVEN)
            operations.append(counted.operations.total())
        sync.reducer.synchronize_replicas()
        sync.reducer.synchronize_replicas()  # nothing more to do
        return operations, counted.operations.total(), counted.tensor_bytes["all_reduce"]

    trainable = sum(p.numel() for p in small_model().parameters() if p.requires_grad)
    for operations, at_the_end, bytes_sent in run_thread_ranks(work, 2):
        assert operations == [0, 0, 1, 1, 1, 2, 2]
        assert at_the_end == 3
        assert bytes_sent == 3 * 4 * trainable


def test_what_a_step_tells() -> None:
    """The loss is the global mean; the reading is of this step's own communication."""

    def work(rank: int, group: Any) -> list[tuple[float, float, bool]]:
        comm = ProcessGroupCommunicator(group)
        model = small_model()
        sync = GradientSync(model, comm, LocalSgdReducer(model, comm, inner_steps=2))
        results = train(sync, sgd(model), range(4), UNEVEN)
        return [(float(r.mean_loss), r.weight, r.exposed.seconds() > 0) for r in results]

    first, second = run_thread_ranks(work, 2)
    assert [step[:2] for step in first] == [step[:2] for step in second]
    assert {weight for _, weight, _ in first} == {2 + 4 + 2 + 3}
    assert [met for _, _, met in first] == [False, True, False, True]


class _WithBuffers(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("running", torch.full((3,), float(rank)))
        self.register_buffer("count", torch.tensor(10 + rank))
        generator = torch.Generator().manual_seed(rank)
        self.register_buffer("coarse", torch.randn(64, generator=generator).bfloat16())


def test_buffers_are_averaged_and_counters_are_rank_0s() -> None:
    """Half precision is rounded once, not at each addition."""

    def work(rank: int, group: Any) -> nn.Module:
        model = _WithBuffers(0)
        for name in ("running", "count", "coarse"):
            model.get_buffer(name).zero_()
        model.register_buffer("table", torch.linspace(0, 1, 40))
        reducer = LocalSgdReducer(model, ProcessGroupCommunicator(group), inner_steps=1)
        for name, values in _WithBuffers(rank).named_buffers():
            model.get_buffer(name).copy_(values)  # what training made of them on this rank
        reducer.after_step()
        return model

    coarse = torch.stack([_WithBuffers(rank).coarse.float() for rank in range(4)]).mean(dim=0)
    for model in run_thread_ranks(work, 4):
        assert model.running.tolist() == [1.5] * 3
        assert torch.equal(model.coarse, coarse.bfloat16())
        assert int(model.count) == 10
        # Nobody changed it: its bits stay (the mean of three equal numbers is another one in 17 %).
        assert torch.equal(model.get_buffer("table"), torch.linspace(0, 1, 40))


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state.get(p, {}) for p in model.parameters() if p.requires_grad]
    return [state["exp_avg_sq"].clone() for state in states if state]


@pytest.mark.parametrize(("average", "optimizers"), [(False, 1), (True, 1), (True, 2)])
def test_optimizer_memory_is_averaged_when_asked(average: bool, optimizers: int) -> None:
    def work(rank: int, group: Any) -> list[Tensor]:
        comm = ProcessGroupCommunicator(group)
        model = small_model()
        parts = [adamw(part) for part in ([model] if optimizers == 1 else [model[0], model[2]])]
        reducer = LocalSgdReducer(model, comm, inner_steps=1, average_optimizer=average)
        train(GradientSync(model, comm, reducer), parts, [0], UNEVEN)
        return [moment for part in parts for moment in _moments(model, part)]

    def alone(rank: int) -> list[Tensor]:
        model = small_model()
        optimizer = adamw(model)
        step_alone(model, optimizer, 0, UNEVEN.of(rank, 2), UNEVEN)
        return _moments(model, optimizer)

    results, expected = run_thread_ranks(work, 2), [alone(0), alone(1)]
    for index in range(3):
        mean = (expected[0][index] + expected[1][index]) / 2
        for rank in range(2):
            wanted = mean if average else expected[rank][index]
            assert torch.equal(results[rank][index], wanted)


def test_a_rank_that_never_stepped_has_no_memory_to_average() -> None:
    def work(rank: int, group: Any) -> list[Tensor]:
        comm = ProcessGroupCommunicator(group)
        model = small_model()
        optimizer = adamw(model)
        reducer = LocalSgdReducer(model, comm, inner_steps=1, average_optimizer=True)
        train(GradientSync(model, comm, reducer), optimizer, [0], ONE_RANK_ONLY)
        return _moments(model, optimizer)

    first, second = run_thread_ranks(work, 2)
    assert len(first) == 3
    assert second == []
    model = small_model()
    optimizer = adamw(model)
    step_alone(model, optimizer, 0, [0], ONE_RANK_ONLY)
    assert all(map(torch.equal, first, _moments(model, optimizer)))


def test_a_checkpoint_in_mid_round_resumes_to_the_same_bits() -> None:
    """It ends the round; the run that goes on and the run that resumes are the same."""

    def work(rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        comm = ProcessGroupCommunicator(group)
        ends = []
        model = small_model()
        optimizer = adamw(model)
        sync = GradientSync(model, comm, LocalSgdReducer(model, comm, inner_steps=3))
        train(sync, optimizer, range(4), UNEVEN)
        sync.reducer.gather(optimizer)
        weights = weights_of(model)
        state = copy.deepcopy(optimizer.state_dict())
        sync.reducer.scatter(optimizer)
        for resumed in (False, True):
            if resumed:
                model = small_model()
                optimizer = adamw(model)
                sync = GradientSync(model, comm, LocalSgdReducer(model, comm, inner_steps=3))
                sync.reducer.load_full_weights(weights)
                optimizer.load_state_dict(state)
            train(sync, optimizer, range(4, 9), UNEVEN)
            ends.append(sync.reducer.full_weights())
        return ends[0], ends[1]

    results = run_thread_ranks(work, 3)
    for went_on, resumed in results:
        for name, tensor in went_on.items():
            assert torch.equal(resumed[name], tensor)
            assert torch.equal(results[0][0][name], tensor)


def test_a_checkpoint_gives_rank_0s_memory_to_all() -> None:
    """Also where another rank has state for a parameter and rank 0 has none."""

    def work(rank: int, group: Any) -> dict[str, Any]:
        comm = ProcessGroupCommunicator(group)
        model = small_model()
        optimizer = adamw(model)
        leaves = [[0], []][rank] if rank < 2 else [1]
        for step in range(1 + rank):
            step_alone(model, optimizer, step, leaves, EVEN)
        if rank == 0:
            del optimizer.state[model[2].bias]
        LocalSgdReducer(model, comm).gather(optimizer)
        return optimizer.state_dict()["state"]

    first, *others = run_thread_ranks(work, 3)
    assert first.keys() == {0, 1}
    assert float(first[0]["step"]) == 1
    for other in others:
        assert other.keys() == first.keys()
        for index, state in first.items():
            assert other[index].keys() == state.keys()
            assert all(torch.equal(other[index][name], state[name]) for name in state)


def test_an_error_on_one_rank_reaches_the_others() -> None:
    """In the middle of a round ranks wait for each other in the step's small message."""
    noticed = []

    def work(rank: int, group: Any) -> None:
        comm = ProcessGroupCommunicator(group)
        model = small_model()
        sync = GradientSync(model, comm, LocalSgdReducer(model, comm, inner_steps=2))
        optimizer = sgd(model)
        try:
            train(sync, optimizer, [0], EVEN)
            if rank == 1:
                raise ZeroDivisionError("planted")
            train(sync, optimizer, [1], EVEN)
        except RuntimeError:
            noticed.append(rank)
            raise

    with pytest.raises(ZeroDivisionError, match="planted"):
        run_thread_ranks(work, 3)
    assert sorted(noticed) == [0, 2]


def test_a_round_needs_a_step() -> None:
    with pytest.raises(ConfigError, match="inner_steps must be at least 1, got 0"):
        LocalSgdReducer(small_model(), SingleCommunicator(), inner_steps=0)
