"""Lightning Fabric, as its users write a loop."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync.bench.contestant import Contestant
from gradsync.bench.contestant_base import CLIP_NORM, Blocking, Entrant, Leaves, Site, mean_loss
from gradsync.bench.meter import StepClock


class Fabricated(Entrant):
    """`Fabric.setup`, `backward`, `clip_gradients`; it finds the process group that is there."""

    def __init__(
        self, contestant: Contestant, site: Site, clock: StepClock, blocking: Blocking | None
    ) -> None:
        super().__init__(contestant, site, clock, blocking)
        from lightning_fabric import Fabric

        # On import it lets itself be heard; what it has to say is no part of a table.
        logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
        world = site.world
        self.fabric = Fabric(
            accelerator="cuda" if site.on_cuda else "cpu",
            devices=world.local_world_size,
            num_nodes=world.num_nodes,
            strategy=_strategy(site) if world.is_distributed else "auto",
            precision="bf16-mixed" if site.settings.dtype == "bf16" else "32-true",
        )
        self.fabric.launch()
        self.called: Any
        self.called, self.optimizer = self.fabric.setup(self.model, site.optimizer(self.model))
        if blocking is not None:
            for part in self.called.modules():
                if isinstance(part, DistributedDataParallel):
                    blocking.register(part)

    def backward(self, leaves: Leaves) -> Tensor:
        """See `Entrant.backward`."""
        total = torch.zeros((), device=self.site.device)
        for number, (tokens_BT, targets_BT) in enumerate(leaves, 1):
            unfinished = number < len(leaves)
            with self.fabric.no_backward_sync(self.called, enabled=unfinished):
                loss = mean_loss(self.called(tokens_BT), targets_BT) / len(leaves)
                self.fabric.backward(loss)
            total += loss.detach()
        return total

    def update(self) -> None:
        """See `Entrant.update`."""
        self.fabric.clip_gradients(self.called, self.optimizer, max_norm=CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()


def _strategy(site: Site) -> Any:
    """DDP over the ranks that are there already, whoever started them."""
    from lightning_fabric.plugins.environments import TorchElasticEnvironment
    from lightning_fabric.strategies import DDPStrategy

    size = site.settings.bucket_mb
    options = {} if size is None else {"bucket_cap_mb": size}
    return DDPStrategy(cluster_environment=TorchElasticEnvironment(), **options)
