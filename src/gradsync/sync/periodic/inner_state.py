"""The inner optimizer's state, private to each rank: its average, or a copy of rank 0's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.values import broadcast_json, broadcast_tensors
from gradsync.sync.periodic.mean import mean_over_ranks

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def average_state(
    optimizer_of: Mapping[nn.Parameter, Optimizer],
    parameters: list[nn.Parameter],
    comm: Communicator,
) -> None:
    """Average the optimizers' state of each parameter (momenta, second moments) over ranks.

    Step counts stay different between ranks. A parameter that some rank has not stepped on yet is
    left alone on all ranks.

    Args:
        optimizer_of: the optimizer of each parameter.
        parameters: the same list on all ranks.
        comm: the ranks.
    """
    memories = [_memory(optimizer_of.get(parameter), parameter) for parameter in parameters]
    counts = torch.tensor([len(memory) for memory in memories], dtype=torch.float64)
    extremes = torch.cat([counts, -counts])
    # Whole group, float64 [2 x parameters], blocking: the least and the (negated) largest counts.
    comm.all_reduce(extremes, "min").wait()
    least, most = extremes.chunk(2)
    everywhere = least == -most
    tensors = [
        tensor
        for memory, same in zip(memories, everywhere, strict=True)
        if same
        for tensor in memory
    ]
    with torch.no_grad():
        for tensor, mean in zip(tensors, mean_over_ranks(tensors, comm), strict=True):
            tensor.copy_(mean)


def _memory(optimizer: Optimizer | None, parameter: nn.Parameter) -> list[Tensor]:
    """State tensors of the parameter's own shape, by name."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return [
        value
        for name, value in sorted(state.items())
        if name != "step" and isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


def take_state_of_rank_0(optimizer: Optimizer, comm: Communicator) -> None:
    """Replace the optimizer's state on every rank by rank 0's; all ranks call it.

    For checkpoints, which keep one state: afterwards the run that continues and a run that resumes
    are the same run. Sent through the CPU.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    beside: list[str] = []
    for index, parameter in enumerate(parameters):
        for name, value in optimizer.state.get(parameter, {}).items():
            key = f"{index}/{name}"
            if not isinstance(value, torch.Tensor):
                values[key] = value
                continue
            tensors[key] = value.detach().cpu()
            if value.device == parameter.device:
                beside.append(key)  # Adam keeps `step` on the CPU, unless it is fused
    values, beside = broadcast_json(comm, [values, beside])
    tensors = broadcast_tensors(comm, tensors)
    if comm.rank == 0:
        return
    state: dict[int, dict[str, Any]] = {}
    for key, value in (values | tensors).items():
        index, name = key.split("/", 1)
        home = parameters[int(index)].device
        state.setdefault(int(index), {})[name] = value.to(home) if key in beside else value
    for index, parameter in enumerate(parameters):
        optimizer.state.pop(parameter, None)
        if index in state:
            optimizer.state[parameter] = state[index]
