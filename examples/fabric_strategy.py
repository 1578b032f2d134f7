"""A Lightning Fabric strategy: Fabric launches, places and prepares, gradsync synchronises.

The loop is Fabric's; the model is not wrapped in DDP, and any strategy for kept loops works.

torchrun --nproc-per-node 2 examples/fabric_strategy.py
torchrun --nproc-per-node 2 examples/fabric_strategy.py bucketed
"""

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn

import gradsync as gs


class GradsyncStrategy(DDPStrategy):
    """`Fabric(strategy=GradsyncStrategy("invariant"))`; options are those of `gs.replicate`."""

    def __init__(self, sync: str = "invariant", **options: Any) -> None:
        super().__init__()
        self.sync, self.options = sync, options
        self.handles: dict[nn.Module, Any] = {}
        self._backward_sync_control = self

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Replicate the module, which is on its device; it stays what it is."""
        self.handles[module] = gs.replicate(module, strategy=self.sync, **self.options)
        return module

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """For `fabric.no_backward_sync`: this backward only adds up."""
        return self.handles[module].no_sync() if enabled else nullcontext()

    def teardown(self) -> None:
        """Take the hooks and the process group down."""
        for handle in self.handles.values():
            handle.close()
        self.handles.clear()
        super().teardown()
        dist.destroy_process_group()


def main(sync: str = "invariant") -> None:
    """Train a classifier of four clouds of points."""
    strategy = GradsyncStrategy(sync)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=local)
    fabric.launch()
    torch.manual_seed(fabric.global_rank)  # ranks may start differently
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    centres = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    for number in range(1, 301):
        targets = torch.randint(0, 4, (32,))
        inputs = centres[targets] + 0.5 * torch.randn(32, 16)
        with fabric.no_backward_sync(model, enabled=number % 2 != 0):
            loss = F.cross_entropy(model(inputs), targets)
            fabric.backward(loss / 2)
        if number % 2 == 0:  # every .grad is the mean over ranks
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    weights = gs.weights_sha256(model.named_parameters())
    hashes = fabric.all_gather(torch.tensor(int(weights[:12], 16))).unique()
    fabric.print(f"loss {loss.item():.4f}, {len(hashes)} kind(s) of weights on the ranks")
    strategy.teardown()


if __name__ == "__main__":
    main(*sys.argv[1:])
