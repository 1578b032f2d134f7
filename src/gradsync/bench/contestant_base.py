"""What a contestant has to do: train the same model on the same leaves, each in its own idiom.

A step is cut in two so that one may look at the clock in between; a contestant decides by itself
what belongs to `update`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync.bench.contestant import Contestant
from gradsync.bench.meter import StepClock
from gradsync.bench.meter_wire import device_done
from gradsync.bench.sync_plan import SyncSettings
from gradsync.comm.base import Communicator
from gradsync.comm.choose import communicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.models.gpt import GPT
from gradsync.train.config import OptimConfig
from gradsync.train.optimizer import build_optimizer
from gradsync.world import World

if TYPE_CHECKING:
    from gradsync.comm.groups import Groups

CLIP_NORM = 1.0
"""Largest norm of the gradient, as `gradsync train` has it."""

Leaves = Sequence[tuple[Tensor, Tensor]]
"""A rank's micro-batches: tokens and targets, each [sequences, tokens], int64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """Where contestants meet: what is the same for all of them."""

    settings: SyncSettings
    world: World
    groups: Groups | None = None
    """Inside and between hosts, where a strategy asks for them; made once."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""
        return torch.device(self.world.device)

    @property
    def on_cuda(self) -> bool:
        """Whether an accelerator computes."""
        return self.device.type == "cuda"

    @property
    def comm(self) -> Communicator:
        """Over the ranks of the set, for what is not measured."""
        return communicator(self.world)

    def model(self) -> GPT:
        """The model with its initial weights, the same on all ranks."""
        return GPT(self.settings.config, seed=self.settings.seed).to(self.device)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.AdamW:
        """The trainer's: fused AdamW, matrices decay."""
        return build_optimizer(model, OptimConfig())

    def autocast(self) -> AbstractContextManager[Any]:
        """The mixed precision of a forward."""
        if self.settings.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Blocking:
    """Adds up what collectives take when nothing hides them and all ranks begin them together."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.seconds = 0.0

    def register(self, ddp: DistributedDataParallel) -> None:
        """Be the communication hook of `ddp`, on its process group."""
        comm = ProcessGroupCommunicator(ddp.process_group)

        def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return self._average(comm, bucket.buffer())

        # DDP compares the annotations themselves; here they are strings.
        hook.__annotations__ |= {
            "bucket": dist.GradBucket,
            "return": torch.futures.Future[Tensor],
        }
        ddp.register_comm_hook(None, hook)

    def _average(self, comm: Communicator, tensor: Tensor) -> torch.futures.Future[Tensor]:
        self._comm.barrier()
        device_done()
        begin = time.perf_counter()
        # Whole group, the bucket's [n] and dtype; overlaps nothing, on purpose.
        comm.all_reduce(tensor).wait()
        device_done()
        self.seconds += time.perf_counter() - begin
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(tensor.div_(comm.world_size))
        return done


class Entrant(ABC):
    """A contestant at work on this rank.

    Args:
        contestant: which one, with its options.
        site: where.
        clock: told when the last gradient is there.
        blocking: None, or what takes the time of communication; then nothing may be hidden.
    """

    def __init__(
        self, contestant: Contestant, site: Site, clock: StepClock, blocking: Blocking | None
    ) -> None:
        self.contestant, self.site, self.blocking = contestant, site, blocking
        self.model = site.model()
        clock.watch(self.model.embed.weight)

    @abstractmethod
    def backward(self, leaves: Leaves) -> Tensor:
        """Forward and backward of this rank's leaves; their mean loss, detached, []."""

    @abstractmethod
    def update(self) -> None:
        """The rest of the step."""

    def communicators(self) -> list[Communicator]:
        """Those to count in; see `Wire`."""
        return []

    def weights(self) -> list[Tensor] | None:
        """This rank's copy of the weights; None where a rank has no whole one, or where ranks may
        differ."""
        return [parameter.detach() for parameter in self.model.parameters()]

    @property
    def period(self) -> int:
        """Steps after which what a step sends repeats itself."""
        return 1

    @property
    def knows_communication(self) -> bool:
        """Whether `blocking` can see all of it."""
        return True

    def close(self) -> None:  # noqa: B027  optional
        """Give back hooks and threads."""


def mean_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Cross-entropy as most loops write it: the mean over targets, []."""
    return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


def make_leaves(site: Site, batch_size: int) -> Leaves:
    """Random tokens of this rank, the same in every step; others on each rank and leaf."""
    settings = site.settings
    shape = (2, batch_size // settings.leaves_per_rank, settings.tokens)
    made = []
    for leaf in range(settings.leaves_per_rank):
        place = site.world.rank * settings.leaves_per_rank + leaf
        generator = torch.Generator().manual_seed(settings.seed * 100_003 + place)
        tokens, targets = torch.randint(settings.config.vocab_size, shape, generator=generator)
        made.append((tokens.to(site.device), targets.to(site.device)))
    return made
