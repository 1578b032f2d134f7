"""A frozen backbone with trainable adapters and a head: only what trains is synchronised.

python examples/adapters.py
torchrun --nproc-per-node 2 examples/adapters.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradsync.compat import DDPManager


class Adapter(nn.Module):
    """A low-rank residual beside a frozen layer (Houlsby et al. 2019, arXiv 1902.00751)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        nn.init.zeros_(self.up.weight)  # begins as the identity
        nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, width] to [B, width]."""
        return x + self.up(F.gelu(self.down(x)))


def rings(num_points: int = 2048) -> TensorDataset:
    """Points around the origin, float32 [N, 2], and which of two rings they lie on, int64 [N]."""
    generator = torch.Generator().manual_seed(0)
    ring = torch.arange(num_points) % 2
    angle = 6.2832 * torch.rand(num_points, generator=generator)
    radius = 1.0 + ring + 0.2 * torch.randn(num_points, generator=generator)
    return TensorDataset(torch.stack([radius * angle.cos(), radius * angle.sin()], 1), ring)


torch.manual_seed(0)
backbone = nn.Sequential(nn.Linear(2, 64), nn.Tanh()).requires_grad_(False)
adapter, head = Adapter(64, 4), nn.Linear(64, 2)

with DDPManager() as manager:
    manager.wrap_model(backbone)  # nothing trains in it: only moved to the device
    manager.wrap_model(adapter, head)  # two modules, one engine
    trainable = [*adapter.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    batches = manager.get_dataloader(rings(), batch_size=64 // manager.world.world_size)
    for _ in range(6):
        for points, targets in batches:
            loss = F.cross_entropy(head(adapter(backbone(points))), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    mean_loss = manager.all_reduce(loss.detach())
    if manager.is_main_process:
        count = sum(p.numel() for p in trainable)
        print(f"loss {mean_loss.item():.4f}, {count} parameters synchronised")
