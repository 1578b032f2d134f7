"""Hugging Face Accelerate, as its users write a loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync.bench.contestant import Contestant
from gradsync.bench.contestant_base import CLIP_NORM, Blocking, Entrant, Leaves, Site, mean_loss
from gradsync.bench.meter import StepClock
from gradsync.runtime import environ


class Accelerated(Entrant):
    """`Accelerator.prepare`, `accumulate`, `backward`; it finds the process group that is there."""

    def __init__(
        self, contestant: Contestant, site: Site, clock: StepClock, blocking: Blocking | None
    ) -> None:
        super().__init__(contestant, site, clock, blocking)
        from accelerate import Accelerator

        # One rank is a script that nobody launched: by these it would take itself for one of many.
        alone = {} if site.world.is_distributed else {"LOCAL_RANK": "-1", "WORLD_SIZE": "1"}
        with environ.exported(alone):
            self.accelerator = Accelerator(
                cpu=not site.on_cuda,
                mixed_precision="bf16" if site.settings.dtype == "bf16" else "no",
                gradient_accumulation_steps=site.settings.leaves_per_rank,
                kwargs_handlers=_bucket_size(site),
            )
        optimizer = site.optimizer(self.model)
        self.called: Any
        self.called, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        if blocking is not None and isinstance(self.called, DistributedDataParallel):
            blocking.register(self.called)

    def backward(self, leaves: Leaves) -> Tensor:
        """See `Entrant.backward`. Accelerate divides by the number of leaves itself, and its
        optimizer only steps when gradients are whole, so calling it after the last leaf will do."""
        total = torch.zeros((), device=self.site.device)
        for tokens_BT, targets_BT in leaves:
            with self.accelerator.accumulate(self.called):
                loss = mean_loss(self.called(tokens_BT), targets_BT)
                self.accelerator.backward(loss)
            total += loss.detach()
        return total / len(leaves)

    def update(self) -> None:
        """See `Entrant.update`."""
        self.accelerator.clip_grad_norm_(self.called.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def close(self) -> None:
        """Accelerate keeps what it prepared for the life of the process."""
        self.accelerator.free_memory()


def _bucket_size(site: Site) -> list[Any]:
    from accelerate import DistributedDataParallelKwargs

    if site.settings.bucket_mb is None:
        return []
    return [DistributedDataParallelKwargs(bucket_cap_mb=site.settings.bucket_mb)]
