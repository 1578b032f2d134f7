"""Optimizers on pieces of parameters, with the same bits as on whole parameters.

[Note: 16 bits and threads] Torch's vector loops compute 16-bit elements in fp32 and round them
once. The few elements after the last full vector go through a scalar loop, which rounds after each
operation. On a CPU a tensor of more than 32,768 elements is divided among the intra-op threads, so
such tails occur at other elements in a piece than in the whole. With torch 2.13 and 2 to 4 threads
up to 21 of 100,003 elements differ (SGD, RMSprop, ASGD, weight decay in Adam). None differ with
AdamW or a fused optimizer, with one thread, or in fp32 and fp64.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from gradsync.sync.step_metadata import options

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("gradsync")

_ONE_THREAD_TAKES = 32_768
"""Elements: torch's grain of work on a CPU (`at::internal::GRAIN_SIZE`)."""

_HALF = (torch.bfloat16, torch.float16)
_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)


def why_not_elementwise(optimizer_class: Any) -> str:
    """What to say of a class that may look at several elements at a time; "" of others."""
    if optimizer_class in _ELEMENTWISE:
        return ""
    return (
        f"{getattr(optimizer_class, '__name__', optimizer_class)} is not known to be "
        "elementwise (to give for a piece of a parameter what it gives for the whole; "
        "gs.ShardedOptimizer takes your word for it: elementwise=True)"
    )


class PieceOptimizer:
    """An optimizer over pieces of parameters; it never sees the rest of them.

    Args:
        optimizer_class: elementwise.
        defaults: `defaults` of the optimizer that the user made.
        groups: that optimizer's parameter groups.
        pieces: the number of its group and the elements, a flat view of the weights, of each piece.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        defaults: dict[str, Any],
        groups: Sequence[Mapping[str, Any]],
        pieces: Iterable[tuple[int, Tensor]],
    ) -> None:
        own: dict[int, list[Tensor]] = {}
        for number, tensor in pieces:
            own.setdefault(number, []).append(tensor)
        self._numbers = sorted(own)
        self.inner: Optimizer | None = None
        """None if this rank owns nothing."""
        self.state: Any = {}
        """State by piece, as `Optimizer.state`."""
        if own:
            known = inspect.signature(optimizer_class.__init__).parameters
            anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
            self.inner = optimizer_class(
                [{**options(groups[n]), "params": own[n]} for n in self._numbers],
                # `defaults` may hold more than the constructor accepts (AdamW's do).
                **{name: v for name, v in defaults.items() if anything or name in known},
            )
            self.state = self.inner.state

    def step(
        self, groups: Sequence[Mapping[str, Any]], gradients: Iterable[tuple[Tensor, Tensor | None]]
    ) -> None:
        """Do one step, with the current hyper-parameters of the user's `groups` and the flat
        gradient of each piece, [piece.numel()]; pieces without one do not change."""
        if self.inner is None:
            return
        pairs = list(gradients)
        for tensor, gradient in pairs:
            tensor.grad = gradient
        for group, number in zip(self.inner.param_groups, self._numbers, strict=True):
            group.update(options(groups[number]))
        self.inner.step()
        for tensor, _ in pairs:
            tensor.grad = None


def state_like(optimizer: Optimizer, dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """The optimizer's state of a parameter in each group, by name: an example of 64 elements or of
    one number, found by a step on 64 zeros."""
    found = []
    for group in optimizer.param_groups:
        trial = torch.nn.Parameter(torch.zeros(64, dtype=dtype))
        pieces = PieceOptimizer(type(optimizer), optimizer.defaults, [group], [(0, trial)])
        pieces.step([group], [(trial, torch.zeros(64, dtype=dtype))])
        found.append({n: value for n, value in pieces.state[trial].items() if value is not None})
    return found


def why_whole(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> str:
    """Reason why every rank must run the whole optimizers; "" if each may update its share.

    Equal on all ranks, whose optimizers are equal, and in all steps; see also `watch.why_not_now`.
    """
    for optimizer in optimizers:
        if why := why_not_elementwise(type(optimizer)):
            return why
    if any(parameter.numel() == 0 for parameter in parameters):
        return "a parameter has no elements"
    half = any(parameter.dtype in _HALF for parameter in parameters)
    if half and torch.get_num_threads() > 1:  # see [Note: 16 bits and threads] in the module
        return "16-bit parameters round otherwise in pieces, with several threads"
    return ""


def warn_of_threads(parameters: Iterable[Tensor]) -> None:
    """Warn if this number of threads may round one of the `parameters`, which are cut into pieces,
    differently; see [Note: 16 bits and threads]."""
    threads = torch.get_num_threads()
    for parameter in parameters if threads > 1 else ():
        half = parameter.dtype in _HALF and parameter.is_cpu
        if half and parameter.numel() > _ONE_THREAD_TAKES:
            log.warning(
                "a %s parameter of shape %s is updated in pieces, with %d intra-op threads: its "
                "last bits can differ from those on another number of ranks; for equal ones take "
                "one thread: gs.init(threads=1) or torch.set_num_threads(1)",
                *(parameter.dtype, tuple(parameter.shape), threads),
            )
            return
