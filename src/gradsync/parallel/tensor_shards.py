"""Tensor parallelism inside of a block: heads and the SwiGLU's width are divided over ranks.

Shoeybi et al. 2019, "Megatron-LM", arXiv 1909.08053: a matrix that makes heads (or hidden columns)
is cut by outputs, the matrix behind it by inputs, so that only its product is summed over shards:

    x ─ enter ─► q k v / gate up (columns) ─► attention / silu ─► out / down (rows) ─ leave ─► y
        backward: sum over shards                        forward: sum over shards

Between `leave` and the next `enter` every shard holds the same activations, bit for bit, since an
all-reduce gives all ranks the same bits. So norms, embedding and head are replicated and stay equal
without a message of their own, and dropout there is the same on all shards.

[Note: Plain shards] The styles below are `parallelize_module`'s, but what they leave behind are
plain tensors, not DTensors: our strategies sum flat memory, and a gradient that is plain memory can
be summed by any of them over the replicas of a shard.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from gradsync.comm.base import Communicator
from gradsync.models.gpt import Block
from gradsync.parallel.partition import COLUMNS, ROWS


def divide_block(block: Block, mesh: DeviceMesh, comm: Communicator) -> None:
    """Leave this rank's shard of `block`, which is on the meta device still."""
    columns, rows = _Cut(comm, COLUMNS), _Cut(comm, ROWS)
    enter = _Enter(comm)
    parallelize_module(
        block,
        mesh,
        {
            "attention": enter,
            "attention.q": columns,
            "attention.k": columns,
            "attention.v": columns,
            "attention.out": rows,
            "mlp": enter,
            "mlp.gate": columns,
            "mlp.up": columns,
            "mlp.down": rows,
        },
    )
    block.attention.n_head //= comm.world_size
    block.attention.n_kv_head //= comm.world_size


class _Enter(ParallelStyle):
    """The module's input is on every shard; its gradient is the sum over shards."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = self._comm

        def enter(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (_CopyToShards.apply(inputs[0], comm), *inputs[1:])

        module.register_forward_pre_hook(enter)
        return module


class _Cut(ParallelStyle):
    """A linear layer keeps its share of outputs (columns), or of inputs (rows): then its output is
    summed over shards."""

    def __init__(self, comm: Communicator, dim: int) -> None:
        self._comm, self._dim = comm, dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        assert module.weight.is_meta, "nothing of the whole matrix is in memory"
        share = module.weight.chunk(self._comm.world_size, self._dim)[0]
        module.weight = nn.Parameter(torch.empty_like(share))
        module.out_features, module.in_features = share.shape
        if self._dim == ROWS:
            comm = self._comm
            module.register_forward_hook(lambda _, __, output: _SumOfShards.apply(output, comm))
        return module


class _CopyToShards(torch.autograd.Function):
    """Forward: the input. Backward: the sum of the shards' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """Nothing is sent."""
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """One all-reduce over the shards, x's shape and dtype; nothing to overlap with."""
        return _summed(grads[0], ctx.comm), None


class _SumOfShards(torch.autograd.Function):
    """Forward: the sum of the shards' products. Backward: the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        """One all-reduce over the shards, x's shape and dtype; nothing to overlap with."""
        return _summed(x, comm)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Nothing is sent."""
        return grads[0], None


def _summed(x: Tensor, comm: Communicator) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    comm.all_reduce(total).wait()
    return total
