"""Tensors that an all-reduce can combine, checked before the first message.

Later, one rank would fail in the middle, and the others wait for it until the timeout.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from gradsync.comm.base import Communicator
from gradsync.comm.combine import combine
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError

Op = Literal["sum", "mean", "min", "max"]

_OF_GLOO = {
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.complex128, torch.complex64, torch.complex32),
}
"""Dtypes that Gloo's all-reduce adds. Other backends refuse by themselves, on all ranks alike."""


def check_supported(comm: Communicator, tensor: Tensor, op: Op, algorithm: str) -> None:
    """Refuse tensors that cannot be combined, without a message: ranks with equal tensors agree.

    Args:
        comm: the ranks.
        tensor: the tensor to combine, any shape.
        op: sum, mean, min or max.
        algorithm: as the user named it.

    Raises:
        ConfigError: with algorithm, op and dtype.
    """
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"the mean of {tensor.dtype} would be cut off; use op='sum' and divide, or convert it"
        )
    reason = _refusal(comm, tensor, op, algorithm)
    if reason is not None:
        kind = "" if tensor.layout == torch.strided else f" in {tensor.layout}"
        raise ConfigError(
            f"all_reduce with algorithm={algorithm!r}, op={op!r} does not take "
            f"{tensor.dtype}{kind}: {reason}"
        )


def _refusal(comm: Communicator, tensor: Tensor, op: Op, algorithm: str) -> str | None:
    if tensor.layout != torch.strided:
        return "only dense tensors travel; use tensor.to_dense()"
    if tensor.is_complex() and op in ("min", "max"):
        return "complex numbers have no order; reduce a real tensor, such as tensor.abs()"
    if algorithm != "backend":
        nothing = tensor.detach().new_empty(0)
        try:
            combine("sum" if op == "mean" else op, nothing, nothing, out=nothing)
        except RuntimeError:
            return f"torch has no such arithmetic on {tensor.device.type}; convert it"
    elif tensor.dtype not in _OF_GLOO and _is_gloo(comm, tensor.device):
        return "Gloo cannot; convert it"
    return None


def _is_gloo(comm: Communicator, device: torch.device) -> bool:
    return isinstance(comm, ProcessGroupCommunicator) and comm.backend_for(device) == "gloo"
