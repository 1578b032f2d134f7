"""How far one optimizer step may lie from another one of the same numbers.

Both steps are elementwise, so the same bits are expected. Only the code path may differ (a vector
loop's scalar end, a fused multiply-add), which changes roundings, not the formula. Each bound is a
count of roundings times the sum of magnitudes that they act on; see [Note: Bounds] in tolerance.py.

AdamW (Loshchilov & Hutter, arXiv 1711.05101), b1, b2, lr, decay:

    m' = b1 m + (1-b1) g             4 roundings on  b1 |m| + (1-b1) |g|
    v' = b2 v + (1-b2) g g           5 roundings on  b2 v + (1-b2) g^2
    w' = (1 - lr decay) w - lr/c1 m' / (sqrt(v'/c2) + eps)
                                     3 on |w|, and on the quotient 4 (m') + 3 (half of v') + 8

SGD with momentum:

    d = g + decay w,  b' = momentum b + d,  w' = w - lr b'       6 roundings on all magnitudes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradsync.verify.tolerance import SMALLEST_NORMAL, gamma
from gradsync.verify.trace import Tensors

_ADAM = {"exp_avg": 4, "exp_avg_sq": 5}
_ADAM_WEIGHT = 15
_SGD = 6


def update_bounds(
    name: str,
    *,
    group: Mapping[str, Any],
    weight: Tensor,
    gradient: Tensor,
    before: Tensors,
    after: Tensors,
    dtype: str,
) -> dict[str, Tensor]:
    """Largest difference of weight ("") and each state tensor (its slot), elementwise, fp64.

    Args:
        name: of the parameter.
        group: the optimizer's settings for it.
        weight: before the step.
        gradient: that the optimizer saw.
        before, after: optimizer state as `slot/parameter`.
        dtype: of the weight.
    """
    w, g = weight.double().abs(), gradient.double().abs()
    tiny = SMALLEST_NORMAL[dtype]

    def old(slot: str) -> Tensor:
        found = before.get(f"{slot}/{name}")
        return torch.zeros_like(w) if found is None else found.double().abs()

    if "betas" not in group:
        total = group["momentum"] * old("momentum_buffer") + g + group["weight_decay"] * w
        bound = gamma(_SGD, dtype) * total + tiny
        return {"": gamma(_SGD, dtype) * w + group["lr"] * bound, "momentum_buffer": bound}
    b1, b2 = group["betas"]
    m = b1 * old("exp_avg") + (1 - b1) * g
    v = b2 * old("exp_avg_sq") + (1 - b2) * g * g
    step = float(after[f"step/{name}"])
    root = (after[f"exp_avg_sq/{name}"].double() / (1 - b2**step)).sqrt() + group["eps"]
    quotient = group["lr"] / (1 - b1**step) * m / root
    return {
        "": gamma(_ADAM_WEIGHT, dtype) * (w + quotient) + tiny,
        "exp_avg": gamma(_ADAM["exp_avg"], dtype) * m + tiny,
        "exp_avg_sq": gamma(_ADAM["exp_avg_sq"], dtype) * v + tiny,
    }
