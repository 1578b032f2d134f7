"""`powersgd` on real process groups: against `ddp`, and against what error feedback promises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.options import DdpOptions, PowerSgdOptions
from gradsync.sync.torch_ddp import TorchDdpReducer
from support.rank_session import open_session

SIDE = 16
START = 3
TIGHT = {"bucket_mb": 0.0015}
"""About one matrix to a bucket: several are under way at once."""


def _bind(
    comm: Communicator, seed: int, options: dict[str, Any] | None
) -> tuple[GradientSync, nn.Module]:
    """Three layers under `powersgd` with `options`, under `ddp` with None."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        *[layer for _ in range(2) for layer in (nn.Linear(SIDE, SIDE), nn.Tanh())],
        nn.Linear(SIDE, SIDE),
    )
    how = DdpOptions(**TIGHT) if options is None else PowerSgdOptions(**TIGHT, **options)
    return GradientSync(model, comm, TorchDdpReducer(model, comm, how)), model


def _leaf(sync: GradientSync, seed: int, *, last: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    x_BC = torch.randn(6, SIDE, generator=generator)
    with sync.micro_step(last=last):
        loss = (sync.forward(x_BC) - x_BC.tanh().flip(1)).square().sum()
        sync.backward(loss, weight=len(x_BC), reduction="sum")


def _train(
    rank: int,
    world_size: int,
    store_path: str,
    options: dict[str, Any] | None,
    steps: int,
    lr: float,
    prime: bool = False,
    data_seeds: int = 1000,
    empty_step: int | None = None,
) -> tuple[list[float], list[Tensor], list[Tensor], int]:
    """Losses, the first matrix's mean gradient at each step, the weights at the end, and how many
    elements the hook's P has (0: nothing was compressed).

    Each rank has two leaves a step, but in `empty_step` only rank 0 has one.
    """
    with open_session(rank, world_size, store_path) as world:
        sync, model = _bind(communicator(world), 0, options)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        losses: list[float] = []
        gradients: list[Tensor] = []
        optimizer.register_step_pre_hook(
            lambda *_: gradients.append(model[0].weight.grad.detach().clone())
        )
        if prime:
            sync.prime(lambda: sync.forward(torch.full((1, SIDE), 9.0)).sum().backward())
        for step in range(steps):
            seed = 10 * (step % data_seeds) + 2 * rank
            if step == empty_step:
                if rank == 0:
                    _leaf(sync, seed, last=False)
            else:
                _leaf(sync, seed, last=False)
                _leaf(sync, seed + 1, last=True)
            losses.append(float(sync.step(optimizer).mean_loss) / SIDE)
        state = sync.reducer.hook.state if options is not None else None
        size = 0 if state is None else sum(len(p) for p in state.p_memory_dict.values())
        return losses, gradients, [p.detach().clone() for p in model.parameters()], size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("prime", [False, True])
def test_it_is_ddp_until_it_starts(pool: Any, prime: bool, world_size: int) -> None:
    """Not one step longer: the priming step does not count. Replicas are equal all the way."""
    options = {"start_powerSGD_iter": START}
    plain = pool.run(_train, world_size, None, 6, 0.1, prime)
    compressed = pool.run(_train, world_size, options, 6, 0.1, prime)
    for rank in range(world_size):
        pairs = zip(plain[rank][1], compressed[rank][1], strict=True)
        same = [torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in pairs]
        assert same == [step < START for step in range(6)]
        assert all(map(torch.equal, compressed[rank][2], compressed[0][2]))
        assert int(torch.linalg.matrix_rank(compressed[rank][1][START])) == 1
        assert int(torch.linalg.matrix_rank(plain[rank][1][START])) > 1


def test_at_full_rank_it_is_ddp_to_rounding(pool: Any) -> None:
    options = {
        "start_powerSGD_iter": 2,
        "matrix_approximation_rank": SIDE,
        "min_compression_rate": 0.01,
    }
    plain = pool.run(_train, 2, None, 5, 0.1)
    full = pool.run(_train, 2, options, 5, 0.1)
    assert full[0][3] == 3 * SIDE * (SIDE + 1)  # three whole matrices, three biases
    for one, two in zip(plain[0][1], full[0][1], strict=True):
        torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-5)


def test_error_feedback_loses_nothing_in_the_long_run(pool: Any) -> None:
    """A gradient that stays the same (learning rate 0): what was left out comes later.

    After T compressed steps the sum of what was applied is T g minus the last error, whose size
    does not grow with T. Without feedback the same part is left out each time.
    """
    steps = 122

    def relative_error(options: dict[str, Any]) -> tuple[float, float]:
        _, gradients, _, _ = pool.run(_train, 2, options, steps, 0.0, False, 1)[0]
        true, applied = gradients[0], torch.stack(gradients[2:])
        last, mean = applied[-1], applied.mean(dim=0)
        return (
            float((last - true).norm() / true.norm()),
            float((mean - true).norm() / true.norm()),
        )

    single, average = relative_error({"start_powerSGD_iter": 2})
    assert single > 0.3
    assert average < 0.1
    _, biased = relative_error({"start_powerSGD_iter": 2, "use_error_feedback": False})
    assert biased > 0.3


def test_a_step_in_which_a_rank_has_no_leaf_travels_whole(pool: Any) -> None:
    plain = pool.run(_train, 2, None, 4, 0.0, False, 1, 3)
    compressed = pool.run(_train, 2, {"start_powerSGD_iter": 2}, 4, 0.0, False, 1, 3)
    for rank in range(2):
        assert not torch.equal(plain[rank][1][2], compressed[rank][1][2])
        assert torch.equal(plain[rank][1][3], compressed[rank][1][3])
        assert all(map(torch.equal, compressed[rank][2], compressed[0][2]))


def _zero_gradient(rank: int, world_size: int, store_path: str) -> bool:
    with open_session(rank, world_size, store_path) as world:
        comm = communicator(world)
        model = nn.ModuleList([nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)])
        options = PowerSgdOptions(start_powerSGD_iter=2, warm_start=False)
        reducer = TorchDdpReducer(model, comm, options)
        model.forward = lambda x_BC: model[0](x_BC) + 0.0 * model[1](x_BC)
        sync = GradientSync(model, comm, reducer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            _leaf(sync, step, last=True)
            sync.step(optimizer)
        return all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_matrix_without_gradient_stays_finite(pool: Any) -> None:
    """Torch's default divides the zero columns by their length."""
    assert pool.run(_zero_gradient, 2) == [True, True]
