"""Plain torch: a loop that talks to nobody, and torch's DistributedDataParallel."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync.bench.contestant import Contestant
from gradsync.bench.contestant_base import CLIP_NORM, Blocking, Entrant, Leaves, Site, mean_loss
from gradsync.bench.meter import StepClock


class Alone(Entrant):
    """The ideal: a training loop on this rank's leaves, nothing else."""

    def __init__(
        self, contestant: Contestant, site: Site, clock: StepClock, blocking: Blocking | None
    ) -> None:
        super().__init__(contestant, site, clock, blocking)
        self.optimizer = site.optimizer(self.model)
        self.called: Any = self.model

    def backward(self, leaves: Leaves) -> Tensor:
        """See `Entrant.backward`."""
        total = torch.zeros((), device=self.site.device)
        for number, (tokens_BT, targets_BT) in enumerate(leaves, 1):
            with self._accumulating(last=number == len(leaves)):
                with self.site.autocast():
                    loss = mean_loss(self.called(tokens_BT), targets_BT) / len(leaves)
                loss.backward()
            total += loss.detach()
        return total

    def update(self) -> None:
        """See `Entrant.update`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> list[Tensor] | None:
        """Every rank goes its own way."""
        return None

    def _accumulating(self, *, last: bool) -> Any:
        return nullcontext()


class TorchDdp(Alone):
    """As torch's tutorial writes it; options go to `DistributedDataParallel`, `backend` makes a
    process group of that backend for it. On one rank it is the loop alone, as users run it."""

    def __init__(
        self, contestant: Contestant, site: Site, clock: StepClock, blocking: Blocking | None
    ) -> None:
        super().__init__(contestant, site, clock, blocking)
        self._group: Any = None
        if not site.world.is_distributed:
            return
        options = dict(contestant.options)
        if backend := options.pop("backend", None):
            import_module("gradsync.backends")  # registers ours
            options["process_group"] = self._group = dist.new_group(backend=backend)
        if site.settings.bucket_mb is not None:
            options.setdefault("bucket_cap_mb", site.settings.bucket_mb)
        ids = [site.device.index] if site.on_cuda else None
        self.called = DistributedDataParallel(self.model, device_ids=ids, **options)
        if blocking is not None:
            blocking.register(self.called)

    def weights(self) -> list[Tensor] | None:
        """See `Entrant.weights`."""
        return [parameter.detach() for parameter in self.model.parameters()]

    def close(self) -> None:
        """See `Entrant.close`."""
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def _accumulating(self, *, last: bool) -> Any:
        skip = not last and isinstance(self.called, DistributedDataParallel)
        return self.called.no_sync() if skip else nullcontext()
