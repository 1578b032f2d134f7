"""Strategies of the registry, used as `gradsync train` uses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradsync.bench.contestant import Contestant
from gradsync.bench.contestant_base import CLIP_NORM, Blocking, Entrant, Leaves, Site
from gradsync.bench.meter import StepClock
from gradsync.bench.meter_wire import Watched
from gradsync.comm.base import Communicator
from gradsync.models.gpt import loss_sum
from gradsync.sync.engine.over_hosts import OverHosts
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.sync.torch_ddp import TorchDdpReducer
from gradsync.train.setup import trainer_options

_UNSEEN = ("fsdp", "powersgd")
"""Torch's own, with messages that cannot be made to block from outside."""
_DRIFTING = ("local_sgd", "diloco")
"""Ranks differ between meetings."""


class Synchronised(Entrant):
    """A strategy of ours.

    To take the time of its communication, nothing may overlap: strategies of the engine get
    `overlap=False` and tell by their own stopwatch, others are waited for at each collective.
    """

    def __init__(
        self, contestant: Contestant, site: Site, clock: StepClock, blocking: Blocking | None
    ) -> None:
        super().__init__(contestant, site, clock, blocking)
        self.strategy = STRATEGIES[contestant.name]
        options = given_options(contestant, site)
        by_engine = self.strategy.recipe is not None
        if blocking is not None and by_engine:
            options["overlap"] = False
        if contestant.compile == "ddp":
            options["compile_wrapper"] = True
        if contestant.compile == "model":
            self.model.compile()
        self._period = options.get("inner_steps", 1)
        self.sync = replicate(
            self.model, site.world, sync=contestant.name, groups=site.groups, **options
        )
        self._prime()
        self.optimizer = site.optimizer(self.model)  # fsdp replaces the parameters
        self._watched: Watched | None = None
        if blocking is not None and isinstance(self.sync.reducer, TorchDdpReducer):
            if self.knows_communication and site.world.is_distributed:
                blocking.register(self.sync.reducer.ddp)
        elif blocking is not None:
            # Of the engine's, what follows the update: parameters of sharded strategies.
            timed = ("all_gather",) if by_engine else ("all_reduce", "broadcast", "all_gather")
            self._watched = Watched(self.sync.comm, timed=timed, before=site.comm.barrier)
        self._exposed_counts = blocking is not None and by_engine

    @property
    def period(self) -> int:
        """See `Entrant.period`."""
        return self._period

    @property
    def knows_communication(self) -> bool:
        """See `Entrant.knows_communication`."""
        return self.contestant.name not in _UNSEEN

    def backward(self, leaves: Leaves) -> Tensor:
        """See `Entrant.backward`."""
        total = torch.zeros((), device=self.site.device)
        first = self.site.world.rank * len(leaves)
        weight = 0
        for number, (tokens_BT, targets_BT) in enumerate(leaves):
            last = number == len(leaves) - 1
            with self.sync.micro_step(last=last, index=first + number):
                with self.site.autocast():
                    loss = loss_sum(self.sync.forward(tokens_BT), targets_BT)
                self.sync.backward(loss, weight=targets_BT.numel())
            total += loss.detach()
            weight += targets_BT.numel()
        return total / weight

    def update(self) -> None:
        """See `Entrant.update`."""
        if self._exposed_counts:
            self.site.comm.barrier()
        before = 0.0 if self._watched is None else self._watched.seconds
        result = self.sync.step(self.optimizer, clip_norm=CLIP_NORM)
        if self.blocking is not None:
            if self._exposed_counts:
                self.blocking.seconds += result.exposed.seconds()
            if self._watched is not None:
                self.blocking.seconds += self._watched.seconds - before

    def communicators(self) -> list[Communicator]:
        """See `Entrant.communicators`."""
        levels = self.site.groups
        found = [self.sync.comm] if levels is None else [self.sync.comm, levels.intra, levels.inter]
        transport = getattr(self.sync.reducer, "_transport", None)
        if isinstance(transport, OverHosts):
            found.append(transport.host)
        unique: dict[int, Communicator] = {id(comm): comm for comm in found}
        return list(unique.values())

    def weights(self) -> list[Tensor] | None:
        """See `Entrant.weights`."""
        if not self.sync.reducer.whole_parameters or self.contestant.name in _DRIFTING:
            return None
        return super().weights()

    def close(self) -> None:
        """See `Entrant.close`."""
        if self._watched is not None:
            self._watched.stop()
        self.sync.close()

    def _prime(self) -> None:
        """As the trainer does before its first step."""
        tokens_BT = torch.zeros((1, 2), dtype=torch.int64, device=self.site.device)

        def forward_backward() -> None:
            with self.site.autocast():
                loss = loss_sum(self.sync.forward(tokens_BT), tokens_BT)
            loss.backward()

        self.sync.prime(forward_backward)


def given_options(contestant: Contestant, site: Site) -> dict[str, Any]:
    """The contestant's own options, over those that let it show in so few steps, and those that the
    trainer adds."""
    settings = site.settings
    options: dict[str, Any] = {
        "local_sgd": {"inner_steps": settings.num_steps},  # one meeting in each turn
        "diloco": {"inner_steps": settings.num_steps},
        "powersgd": {"start_powerSGD_iter": 2},
    }.get(contestant.name, {})
    strategy = STRATEGIES[contestant.name]
    has_buckets = strategy.recipe is None or strategy.recipe.grouping == "buckets"
    if settings.bucket_mb is not None and "bucket_mb" in strategy.options and has_buckets:
        options = {**options, "bucket_mb": settings.bucket_mb}
    return trainer_options(contestant.name, {**options, **contestant.options})
