"""Cross-entropy behind the head, for a vocabulary whose logits are too many to keep.

[Note: Loss in rows]
Logits, their fp32 copy, log-probabilities and two gradients of them make 14 bytes for each token
and each word of the vocabulary: 720 MB for 1,024 tokens and 50,257 words. Taken a few hundred rows
(tokens) at a time, only those rows' exist. Their gradient is known as soon as the rows are, so it
is computed at once and nothing is recomputed in backward; what is kept is the gradient with
respect to the head's weight, which backward needs anyway, and to its input.

The sums are the same, in another order: other bits than the whole logits give, the same on any
number of ranks, as the rows are cut from a leaf.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_IGNORED = -100


def loss_sum_in_rows(x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, rows: int) -> Tensor:
    """Cross-entropy of `x @ weight.T`, summed over the targets that are not -100, in nats.

    Args:
        x_NC: what the head sees, any float dtype.
        weight_VC: the head.
        targets_N: int64.
        rows: positions whose logits are in memory at once.

    Returns:
        fp32, 0-dim. Differentiable once.
    """
    if torch.is_grad_enabled() and (x_NC.requires_grad or weight_VC.requires_grad):
        return _InRows.apply(x_NC, weight_VC, targets_N, rows)
    return _in_rows(x_NC, weight_VC, targets_N, rows, None)


class _InRows(torch.autograd.Function):
    """See [Note: Loss in rows]."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, rows: int) -> Tensor:
        """The loss, []; the gradients are computed with it."""
        gradients = torch.empty_like(x_NC), torch.zeros_like(weight_VC)
        loss = _in_rows(x_NC, weight_VC, targets_N, rows, gradients)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Gradients of x, weight, targets and rows."""
        return _scaled(ctx, grad_outputs[0])


@once_differentiable
def _scaled(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x_NC, grad_VC = ctx.saved_tensors
    return grad_x_NC * grad, grad_VC * grad, None, None


def _in_rows(
    x_NC: Tensor,
    weight_VC: Tensor,
    targets_N: Tensor,
    rows: int,
    gradients: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The loss, []; with `gradients`, zeros for the weight's, fills those of x and weight."""
    kind, dtype = x_NC.device.type, x_NC.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    loss = torch.zeros((), dtype=torch.float32, device=x_NC.device)
    with torch.autocast(kind, enabled=False):
        narrow_NC, narrow_VC = x_NC.to(dtype), weight_VC.to(dtype)
        for start in range(0, len(x_NC), rows):
            cut = slice(start, start + rows)
            log_p_RV = F.linear(narrow_NC[cut], narrow_VC).float().log_softmax(-1)
            loss += F.nll_loss(log_p_RV, targets_N[cut], ignore_index=_IGNORED, reduction="sum")
            if gradients is not None:
                grad_RV = _gradient(log_p_RV, targets_N[cut]).to(dtype)
                gradients[0][cut] = grad_RV @ narrow_VC
                gradients[1].add_(grad_RV.T @ narrow_NC[cut])
    return loss


def _gradient(log_p_RV: Tensor, targets_R: Tensor) -> Tensor:
    """Gradient of the summed loss with respect to the logits; uses up `log_p_RV`."""
    counts_R = targets_R != _IGNORED
    p_RV = log_p_RV.exp_().mul_(counts_R.unsqueeze(1))
    row_R = torch.arange(len(targets_R), device=targets_R.device)
    p_RV[row_R, targets_R.clamp_min(0)] -= counts_R.float()
    return p_RV
