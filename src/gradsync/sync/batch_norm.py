"""BatchNorm on several ranks. You must choose one of three modes, because each trains differently.

    choice     statistics in training            running statistics              any world size
    sync       of a micro-step, all ranks'       the same; equal on all ranks    close to equal
    local      of each leaf alone                mean over leaves (buffers.py)   the same bits
    freeze     the running ones, as in eval      do not change                   the same bits

`sync` on W ranks is BatchNorm over the W micro-batches together. More ranks normalise a larger
batch, so the result depends on the world size by definition. The forward updates the running
statistics immediately, even if the step is later refused or discarded. The choice is required at
world size 1 too, so that the same script works on any number of ranks. GroupNorm and LayerNorm do
not use the batch and need no choice. InstanceNorm's statistics always follow the rule for buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.functional import batch_norm

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_gather_numbers
from gradsync.core.torch_private import BatchNorm, input_check
from gradsync.errors import ConfigError
from gradsync.sync.check_replicas import group_ranks, name_ranks
from gradsync.sync.watch import ModuleHook

if TYPE_CHECKING:
    from torch import Tensor

CHOICES: dict[str, str] = {
    "sync": "normalise over all ranks' samples of a micro-step; two small messages a layer",
    "local": "normalise each micro-batch alone, average the running statistics over them; no "
    "waiting",
    "freeze": "keep the running statistics as they are and use them, for pretrained layers",
}
NOT_INVARIANT = (
    "batch_norm='sync' normalises over as many micro-batches at once as there are ranks, so other "
    "world sizes give other bits; use 'local' or 'freeze'"
)

TURNS = ("a forward", "a backward", "the backward of the last micro-batch", "the step's end")
"""What a rank may do next."""


class BatchNormHandling:
    """Handles BatchNorm in one model; made by `choose_batch_norm`."""

    def __init__(self, choice: str | None, comm: Communicator) -> None:
        self.choice = choice
        """The user's choice; None when no layer of the model needs one."""
        self.own_buffers: list[nn.Module] = []
        """Layers that keep their buffers equal on all ranks by themselves."""
        self.replaced: list[tuple[nn.Module, Any]] = []
        """Layers with another forward, and what they had of their own before."""
        self.hook: Any = None
        self._comm = comm

    def meet(self, turn: str) -> None:
        """Under `sync`, raise on every rank if ranks are about to do different things, of `TURNS`.
        A rank with fewer forwards would leave the others waiting in the middle of one.

        Called before the action's other messages. One all-gather, whole group, int64 [1]. Layers in
        eval mode send nothing in a forward.
        """
        if turn == "a forward" and not any(layer.training for layer in self.own_buffers):
            return
        turns = all_gather_numbers(self._comm, TURNS.index(turn))
        if len(set(turns)) > 1:
            sides = " but ".join(
                f"{name_ranks(ranks)} came to {TURNS[index]}"
                for index, ranks in group_ranks(turns).items()
            )
            raise ConfigError(
                f"batch_norm='sync' needs equally many micro-batches on all ranks: {sides}; make "
                "the number of micro-batches in a step a multiple of the number of ranks, or say "
                "'local'"
            )

    def close(self) -> None:
        """Restore the layers' original methods; values do not change."""
        for layer, before in self.replaced:
            del layer.__dict__["forward"]
            if before is not None:
                layer.__dict__["forward"] = before
        self.replaced = []
        if self.hook is not None:
            self.hook.remove()


def choose_batch_norm(
    model: nn.Module, comm: Communicator, choice: str | None
) -> BatchNormHandling:
    """Apply `choice` to the model's BatchNorm layers, in place; names and values do not change.

    Args:
        model: on its device already.
        comm: the ranks over which `sync` sums.
        choice: one of `CHOICES`; None for models without BatchNorm or with layers in eval mode.

    Raises:
        ConfigError: unknown choice; no choice although some layers train, which it names.
    """
    if choice is not None and choice not in CHOICES:
        raise ConfigError(f"unknown batch_norm={choice!r} (there are: {', '.join(CHOICES)})")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, BatchNorm)}
    training = [name for name, m in layers.items() if m.training or not model.training]
    if choice is None and training:
        lines = "".join(f"\n  batch_norm={name!r}: {what}" for name, what in CHOICES.items())
        shown = ", ".join(name or "the model itself" for name in training[:4])
        shown += f" and {len(training) - 4} more" if len(training) > 4 else ""
        raise ConfigError(f"the model has BatchNorm ({shown}): say which{lines}")
    handling = BatchNormHandling(choice if layers else None, comm)
    changed = list(layers.values())
    forward: Callable[..., Any] = _frozen_forward
    if choice == "local":
        changed = [layer for layer in changed if isinstance(layer, nn.SyncBatchNorm)]
        forward = BatchNorm.forward
    elif choice == "sync" and layers:
        forward = _synced_forward(comm)
        handling.own_buffers += changed
        meet = torch.compiler.disable(lambda own, *_: own.meet("a forward"))
        hook = ModuleHook(handling, meet)
        handling.hook = model.register_forward_pre_hook(hook)
    for layer in changed if choice else ():
        # A bound method survives `copy.deepcopy`: the copy's method is bound to the copy. Pickle
        # writes it as "the attribute of that name of that layer", so a loaded layer uses its
        # class's.
        forward.__name__ = "forward"
        handling.replaced.append((layer, layer.__dict__.get("forward")))
        layer.__dict__["forward"] = MethodType(forward, layer)
    return handling


def _frozen_forward(layer: BatchNorm, inputs: Tensor) -> Tensor:
    """As in eval, regardless of `model.train()`; weight and bias still train."""
    input_check(layer)(inputs)
    means, variances = layer.running_mean, layer.running_var
    return batch_norm(inputs, means, variances, layer.weight, layer.bias, eps=layer.eps)


def _synced_forward(comm: Communicator) -> Callable[[BatchNorm, Tensor], Tensor]:
    """BatchNorm's forward with statistics over all ranks; in eval mode, the layer's own forward."""

    @torch.compiler.disable
    def train(layer: BatchNorm, inputs: Tensor) -> Tensor:
        input_check(layer)(inputs)
        outputs, mean, var, count = cast(
            "tuple[Tensor, Tensor, Tensor, Tensor]",
            _SyncedNorm.apply(inputs, layer.weight, layer.bias, (layer.eps, comm)),
        )
        if layer.track_running_stats:
            _update_running(layer, mean, var * (count / (count - 1)))
        return outputs

    def forward(layer: BatchNorm, inputs: Tensor) -> Tensor:
        return train(layer, inputs) if layer.training else type(layer).forward(layer, inputs)

    return forward


@torch.no_grad()
def _update_running(layer: Any, mean: Tensor, unbiased_var: Tensor) -> None:
    """Update as torch does: running = (1 - factor) running + factor x this forward's value."""
    layer.num_batches_tracked.add_(1)
    factor = layer.momentum
    if factor is None:  # the plain mean over all forwards
        factor = 1.0 / float(layer.num_batches_tracked)
    for running, value in ((layer.running_mean, mean), (layer.running_var, unbiased_var)):
        running.mul_(1 - factor).add_(value.to(running.dtype), alpha=factor)


class _SyncedNorm(torch.autograd.Function):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with mean and var over all ranks' x.

    Ioffe & Szegedy 2015 (arXiv 1502.03167). The gradient follows section 3, with n, the number of
    values per channel, counted over all ranks. Ranks may hold different numbers of samples.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        settings: tuple[float, Communicator],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [N, C, ...], (eps, ranks); returns y shaped as x; mean [C], var [C], n [], float64."""
        eps, comm = settings
        wide = _wide(x)
        own_count = x.numel() // x.shape[1]
        own_mean = own_var = torch.zeros(x.shape[1], dtype=wide.dtype, device=x.device)
        if own_count:
            own_var, own_mean = torch.var_mean(wide, [0, *range(2, x.dim())], correction=0)
        own_mean, own_var = own_mean.double(), own_var.double()
        # Whole group, float64 [2C + 1]. The next operation needs it, so nothing overlaps it.
        sums = torch.cat([own_mean, own_var + own_mean.square(), own_mean.new_ones(1)]) * own_count
        comm.all_reduce(sums).wait()
        count = sums[-1]
        if own_count <= 1 and float(count) <= 1:  # equal on all ranks: each has at most one
            raise ConfigError(
                "BatchNorm needs more than one value per channel in training; got "
                f"{int(count)} over all ranks, input {list(x.shape)} on rank {comm.rank}"
            )
        mean, mean_of_squares = (sums[:-1] / count).chunk(2)
        var = (mean_of_squares - mean.square()).clamp_min(0.0)
        inv_std = (var + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, inv_std, count)
        ctx.comm = comm
        ctx.mark_non_differentiable(mean, var, count)
        normal = (wide - _like(mean, wide)) * _like(inv_std, wide)
        if weight is not None:
            normal = normal * _like(weight, wide)
        if bias is not None:
            normal = normal + _like(bias, wide)
        return normal.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore
        """Gradient of x, and this rank's share of the gradients of weight and bias, from
        grad_outputs[0], shaped as y; the others belong to non-differentiable outputs."""
        if torch.is_grad_enabled():
            raise ConfigError(
                f"batch_norm='sync' on rank {ctx.comm.rank}: its gradient cannot be differentiated "
                "again (create_graph=True, a gradient penalty); use 'local' or 'freeze'"
            )
        x, weight, mean, inv_std, count = ctx.saved_tensors
        wide, grad = _wide(x), _wide(grad_outputs[0])
        normal = (wide - _like(mean, wide)) * _like(inv_std, wide)
        all_but_channels = [0, *range(2, x.dim())]
        own_bias = grad.sum(all_but_channels)
        own_weight = (grad * normal).sum(all_but_channels)
        grad_x = None
        if ctx.needs_input_grad[0]:
            # Whole group, float64 [2C]; as in forward, nothing overlaps it.
            sums = torch.cat([own_bias.double(), own_weight.double()])
            ctx.comm.all_reduce(sums).wait()
            of_grad, of_product = (sums / count).chunk(2)
            scale = inv_std if weight is None else inv_std * weight.double()
            grad_x = grad - _like(of_grad, wide) - normal * _like(of_product, wide)
            grad_x = (grad_x * _like(scale, wide)).to(x.dtype)
        grad_weight = own_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = own_bias.to(weight.dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def _wide(x: Tensor) -> Tensor:
    """Convert to float32 or wider: half precision is too coarse for sums."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _like(per_channel: Tensor, x: Tensor) -> Tensor:
    """Reshape [C] to [1, C, 1, ...], in x's dtype."""
    return per_channel.to(x.dtype).reshape(1, -1, *[1] * (x.dim() - 2))
