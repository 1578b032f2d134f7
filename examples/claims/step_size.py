"""How far a step goes: one large batch in place of small ones, a loss that is not divided.

python examples/claims/step_size.py
"""

import torch
from torch import nn

STEPS = 8


def walk(name: str, rate: float, x: torch.Tensor, scale: float = 1.0) -> float:
    """The distance between a small network's weights before and after one step on each batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    begin = nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=rate)
    for batch in x:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
        (scale * loss).backward()
        optimizer.step()
    end = nn.utils.parameters_to_vector(model.parameters()).detach()
    return float((end - begin).norm())


torch.manual_seed(1)
x = torch.randn(STEPS, 32, 16)
for name in ("SGD", "AdamW"):
    small, one = walk(name, 1e-3, x), x.flatten(0, 1)[None]
    large = [f"{walk(name, 1e-3 * k, one) / small:.2f}" for k in (1, STEPS**0.5, STEPS)]
    print(f"{name}, batch x {STEPS}: {', '.join(large)} of the way at lr x 1, 2.83, {STEPS}")
    undivided = walk(name, 1e-3, one, STEPS) / walk(name, 1e-3, one)
    print(f"{name}, loss of {STEPS} micro-batches not divided: {undivided:.2f} times the step")
