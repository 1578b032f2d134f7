"""`diloco` on ranks as threads, against W replicas in plain loops and the paper's formulas."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import CheckpointError, ConfigError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.periodic.diloco import DilocoReducer
from gradsync.sync.periodic.local_sgd import LocalSgdReducer
from support.recording import RecordingCommunicator
from support.round_cases import (
    MakeOptimizer,
    Shares,
    adamw,
    check_rounds,
    run_rounds,
    sgd,
    small_model,
    train,
    weights_of,
)
from support.thread_ranks import run_thread_ranks

UNEVEN = Shares(num_leaves=5, padding=(1,))
ONE_RANK_ONLY = Shares(num_leaves=1)
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9


def _outer_step(replicas: list[nn.Module], memory: dict[str, Any]) -> None:
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
        momentum = delta if before is None else before * OUTER_MOMENTUM + delta
        memory[name] = momentum
        theta.data.sub_(OUTER_LR * (delta + OUTER_MOMENTUM * momentum))
        for replica in replicas:
            replica.get_parameter(name).data.copy_(theta.detach())


def _reducer(inner_steps: int, **options: Any) -> Any:
    return lambda model, comm: DilocoReducer(model, comm, inner_steps=inner_steps, **options)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("inner_steps", "make_optimizer", "shares"),
    [(1, sgd, UNEVEN), (2, adamw, UNEVEN), (2, adamw, ONE_RANK_ONLY), (9, adamw, UNEVEN)],
)
def test_equals_replicas_in_plain_loops(
    world_size: int, inner_steps: int, make_optimizer: MakeOptimizer, shares: Shares
) -> None:
    """Seven steps: up to seven meetings, so that momentum counts."""
    check_rounds(
        world_size,
        _reducer(inner_steps),
        _outer_step,
        make_optimizer,
        shares,
        steps=7,
        inner_steps=inner_steps,
        exact_up_to=0,  # torch writes the same formula in another order
    )


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_plain_outer_step_of_one_is_an_average(world_size: int) -> None:
    def work(rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        comm = ProcessGroupCommunicator(group)
        plain = _reducer(2, outer_lr=1.0, outer_momentum=0.0)
        averaged = lambda model, comm: LocalSgdReducer(model, comm, inner_steps=2)  # noqa: E731
        return (
            run_rounds(comm, plain, adamw, 5, UNEVEN),
            run_rounds(comm, averaged, adamw, 5, UNEVEN),
        )

    for outer, average in run_thread_ranks(work, world_size):
        for name, tensor in average.items():
            torch.testing.assert_close(outer[name], tensor, rtol=1e-5, atol=1e-6)


def test_traffic_is_the_weights_once_a_round() -> None:
    def work(rank: int, group: Any) -> tuple[int, int]:
        comm = ProcessGroupCommunicator(group)
        counted = RecordingCommunicator(comm)
        model = small_model()
        sync = GradientSync(model, comm, DilocoReducer(model, counted, inner_steps=3))
        train(sync, adamw(model), range(7), UNEVEN)
        return counted.operations.total(), counted.tensor_bytes["all_reduce"]

    trainable = sum(p.numel() for p in small_model().parameters() if p.requires_grad)
    assert run_thread_ranks(work, 2) == [(2, 2 * 4 * trainable)] * 2


@pytest.mark.parametrize("with_state", [True, False])
def test_a_checkpoint_in_mid_round_resumes_to_the_same_bits(with_state: bool) -> None:
    """With the outer momentum, that is; without it the test must see a difference."""

    def work(rank: int, group: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        comm = ProcessGroupCommunicator(group)
        ends = []
        model = small_model()
        optimizer = adamw(model)
        reducer = DilocoReducer(model, comm, inner_steps=3)
        sync = GradientSync(model, comm, reducer)
        train(sync, optimizer, range(4), UNEVEN)
        reducer.gather(optimizer)
        weights, inner = weights_of(model), copy.deepcopy(optimizer.state_dict())
        outer = {name: tensor.clone() for name, tensor in reducer.state_tensors().items()}
        for resumed in (False, True):
            if resumed:
                model = small_model()
                optimizer = adamw(model)
                reducer = DilocoReducer(model, comm, inner_steps=3)
                sync = GradientSync(model, comm, reducer)
                model.load_state_dict(weights)  # past the reducer, as a checkpoint loader may
                optimizer.load_state_dict(inner)
                reducer.load_state_tensors(outer if with_state else {})
            train(sync, optimizer, range(4, 9), UNEVEN)
            ends.append(reducer.full_weights())
        return ends[0], ends[1]

    results = run_thread_ranks(work, 2)
    for went_on, resumed in results:
        assert all(torch.equal(went_on[name], results[0][0][name]) for name in went_on)
        same = all(torch.equal(went_on[name], resumed[name]) for name in went_on)
        assert same is with_state


def test_outer_momentum_by_name() -> None:
    model = small_model()
    reducer = DilocoReducer(model, SingleCommunicator(), inner_steps=1)
    assert reducer.state_tensors() == {}  # nobody has met yet
    train(GradientSync(model, SingleCommunicator(), reducer), sgd(model), [0], UNEVEN)
    saved = reducer.state_tensors()
    names = ("0.weight", "2.weight", "2.bias")  # the frozen one has none
    assert list(saved) == [f"outer_momentum/{name}" for name in names]
    assert saved["outer_momentum/0.weight"].shape == (4, 5)

    other = DilocoReducer(small_model(), SingleCommunicator(), inner_steps=1)
    with pytest.raises(CheckpointError, match=r"'2\.bias' is missing, expected \(3,\)"):
        other.load_state_tensors({n: t for n, t in saved.items() if not n.endswith("2.bias")})
    with pytest.raises(
        CheckpointError, match=r"'0\.weight' is of shape \(20,\), expected \(4, 5\)"
    ):
        other.load_state_tensors({n: t.reshape(-1) for n, t in saved.items()})


def test_half_precision_weights_meet_in_fp32() -> None:
    """The outer gradient of bf16 weights is not rounded before it is averaged."""

    def work(rank: int, group: Any) -> Tensor:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        model.weight.data.fill_(1.0)
        reducer = DilocoReducer(
            model, ProcessGroupCommunicator(group), outer_lr=1.0, outer_momentum=0.0
        )
        reducer.reduce([True])
        # 1 + 2^-7 and 1 + 3 * 2^-7: neighbours in bf16 are 2^-7 apart.
        model.weight.data.add_(2**-7 if rank == 0 else 3 * 2**-7)
        reducer.after_step()
        reducer.synchronize_replicas()
        return model.weight.detach()

    for weight in run_thread_ranks(work, 2):
        assert weight.item() == 1 + 2 * 2**-7


def test_an_error_on_one_rank_reaches_the_others() -> None:
    noticed = []
    trained = threading.Barrier(3, timeout=20)

    def work(rank: int, group: Any) -> None:
        comm = ProcessGroupCommunicator(group)
        model = small_model()
        reducer = DilocoReducer(model, comm, inner_steps=2)
        train(GradientSync(model, comm, reducer), adamw(model), [0], UNEVEN)
        trained.wait()
        try:
            if rank == 1:
                raise ZeroDivisionError("planted")
            reducer.synchronize_replicas()
        except RuntimeError:
            noticed.append(rank)
            raise

    with pytest.raises(ZeroDivisionError, match="planted"):
        run_thread_ranks(work, 3)
    assert sorted(noticed) == [0, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner_steps": 0}, "inner_steps must be at least 1, got 0"),
        ({"outer_lr": 0.0}, "outer_lr must be above 0"),
        ({"outer_momentum": 1.0}, "outer_momentum must be in 0 .. 1"),
    ],
)
def test_numbers_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DilocoReducer(small_model(), SingleCommunicator(), **options)
