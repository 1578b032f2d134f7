"""Several devices on a CPU: tensors that say where they are, and refuse to meet others.

Inside of `CpuDevices()`, `.to("cpu:1")` gives a tensor that is on cpu:1 for torch and autograd:
what is computed from tensors of two devices is an error, as on GPUs, and so is a gradient that
comes back to another device. cpu:0 is where ordinary tensors are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map


class Elsewhere(Tensor):
    """A tensor on another one than cpu:0, computed by the CPU."""

    plain: Tensor

    @staticmethod
    def __new__(cls, plain: Tensor, device: torch.device) -> Elsewhere:
        found = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype, device=device
        )
        found.plain = plain
        return found

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [
            leaf for leaf in tree_flatten((args, kwargs or {}))[0] if isinstance(leaf, Tensor)
        ]
        # As on a GPU, a number may come from the CPU.
        homes = {tensor.device for tensor in tensors if tensor.dim() or isinstance(tensor, cls)}
        if len(homes) > 1:
            raise RuntimeError(f"{func} of tensors on {', '.join(sorted(map(str, homes)))}")
        (home,) = homes
        args, kwargs = tree_map(_plain, (args, kwargs or {}))
        made = func(*args, **kwargs)
        return tree_map(lambda leaf: cls(leaf, home) if isinstance(leaf, Tensor) else leaf, made)


class CpuDevices(TorchFunctionMode):
    """For the thread that enters it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], str | torch.device):
            return _Move.apply(args[0], torch.device(args[1]))
        return func(*args, **(kwargs or {}))


class _Move(torch.autograd.Function):
    """A copy on another device; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.home = tensor.device
        return _on(tensor, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _on(gradients[0], ctx.home), None


def _on(tensor: Tensor, device: torch.device) -> Tensor:
    copy = _plain(tensor).clone()
    return Elsewhere(copy, device) if device.index else copy


def _plain(leaf: Any) -> Any:
    return leaf.plain if isinstance(leaf, Elsewhere) else leaf
