"""Contestants: all train the same model on the same micro-batches, each in its library's idiom.

A step has two parts, so that the clock can be read in between. Each contestant decides what belongs
to `update`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gradsync.comm.base import Communicator
from gradsync.comm.groups import communicator
from gradsync.commands.bench.meter import StepClock
from gradsync.commands.bench.sync_plan import ALONE, Contestant, SyncSettings
from gradsync.commands.models.gpt import GPT
from gradsync.commands.train.config import OptimConfig
from gradsync.commands.train.learner import Learner, build_optimizer, trainer_options
from gradsync.data.micro_batch import MicroBatch, make_micro_batch
from gradsync.runtime.machine import pin_threads
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.world import World

CLIP_NORM = 1.0  # largest norm of the gradient, as `gradsync train` has it
_ON_HOST = {"collective": "backend", "overlap_publish": False}  # By messages, as on GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchSite:
    """What all contestants share: world and settings."""

    settings: SyncSettings
    world: World

    @property
    def on_cuda(self) -> bool:
        """Whether the rank computes on CUDA."""
        return self.world.device.type == "cuda"

    @property
    def comm(self) -> Communicator:
        """Over the ranks of the set, for work that is not measured."""
        return communicator(self.world)

    def model(self) -> GPT:
        """The model with its initial weights, the same on all ranks."""
        return GPT(self.settings.config, seed=0).to(self.world.device)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.AdamW:
        """The trainer's: fused AdamW, matrices decay."""
        return build_optimizer(model, OptimConfig())

    def autocast(self) -> AbstractContextManager[Any]:
        """The mixed precision of a forward."""
        enabled = self.settings.dtype == "bf16"
        return torch.autocast(self.world.device.type, dtype=torch.bfloat16, enabled=enabled)

    def micro_batches(self, batch_size: int) -> list[MicroBatch]:
        """Random tokens of this rank, the same in every step; they differ by rank and place."""
        count, batches = self.settings.micro_batches_per_rank, []
        shape = (2, batch_size // count, self.settings.tokens)
        for place in range(count):
            generator = torch.Generator().manual_seed(self.world.rank * count + place)
            batch = torch.randint(self.settings.config.vocab_size, shape, generator=generator)
            batches.append(batch.unbind())
        return micro_batches_of(batches, self.world)


def micro_batches_of(batches: Sequence[tuple[Tensor, ...]], world: World) -> list[MicroBatch]:
    """A rank's micro-batches of a step, in order."""
    place: Any = {"step": 0, "device": world.device}
    first, last = world.rank * len(batches), len(batches) - 1
    return [
        make_micro_batch(
            each, index=first + n, num_samples=len(each[0]), is_last=n == last, **place
        )
        for n, each in enumerate(batches)
    ]


class Entrant:
    """A contestant on this rank: the plain torch loop, which is `none`. Subclasses override what
    their library's documentation writes differently."""

    period = 1  # steps after which the communication pattern repeats
    own_precision = False  # whether the wrapped model enters mixed precision itself

    def __init__(self, contestant: Contestant, site: BenchSite) -> None:
        self.contestant, self.site = contestant, site
        self.micro_batches = site.micro_batches(contestant.batch_size)
        self.model = site.model()
        self.clock = StepClock(self.model.embed.weight)
        self.called: Any = self.model
        self.optimizer: Any = None
        self.sync: Any = None  # of a strategy of ours
        self.mean_loss: Any = None  # of this rank's micro-batches, or of all, in the last step
        self.set_up()

    def set_up(self) -> None:
        """Wrap the model, create the optimizer."""
        self.optimizer = self.site.optimizer(self.model)

    def step(self) -> Tensor:
        """One step; its mean loss, []."""
        self.backward()
        self.update()
        return self.mean_loss

    def backward(self) -> None:
        """Forward and backward of this rank's micro-batches."""
        total = torch.zeros((), device=self.site.world.device)
        for each in self.micro_batches:
            with self.accumulating(last=each.is_last):
                with nullcontext() if self.own_precision else self.site.autocast():
                    logits_BTV = self.called(each.inputs)
                    # As most loops write it: the mean over targets, [].
                    loss = F.cross_entropy(logits_BTV.flatten(0, 1), each.targets.flatten())
                self.differentiate(loss, len(self.micro_batches))
            total += loss.detach()
        self.mean_loss = total / len(self.micro_batches)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        """Context of a micro-batch; gradients are synchronised in the last one only."""
        return nullcontext()

    def differentiate(self, loss: Tensor, count: int) -> None:
        """Add the gradients of a loss, divided by the number of micro-batches."""
        (loss / count).backward()

    def update(self) -> None:
        """The rest of the step."""
        self.clip()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        """Clip gradients to `CLIP_NORM`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)

    def communicator(self) -> Communicator | None:
        """The communicator to count, see `Wire`."""
        return None if self.sync is None else self.sync.comm

    def wait(self) -> None:
        """Return when the last step has no pending work."""
        if self.sync is not None:
            self.sync.replica.wait()

    def close(self) -> None:
        """Remove hooks and stop threads."""
        if self.sync is not None:
            self.sync.close()


class Reference(Entrant):
    """The simplest synchronisation. Every contestant should see its losses."""

    def update(self) -> None:
        comm = self.site.comm
        for parameter in self.model.parameters():
            assert parameter.grad is not None, "the model uses all its parameters"
            # Whole group, the parameter's shape and dtype; overlaps nothing.
            comm.all_reduce(parameter.grad).wait()
            parameter.grad /= comm.world_size
        super().update()


class TorchDdp(Entrant):
    """torch's DistributedDataParallel, as its tutorial writes it, with the given options."""

    def set_up(self) -> None:
        super().set_up()
        site = self.site
        options = dict(self.contestant.options)
        if site.settings.bucket_mb is not None:
            options.setdefault("bucket_cap_mb", site.settings.bucket_mb)
        ids = [site.world.device.index] if site.on_cuda else None
        self.called = DistributedDataParallel(self.model, device_ids=ids, **options)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.called.no_sync()


class Accelerated(Entrant):
    """Hugging Face Accelerate, as its users write a loop: `Accelerator.prepare`, `accumulate`,
    `backward`; it uses the existing process group.

    It divides by the number of micro-batches itself. Its optimizer steps only when gradients are
    complete, so calling it after the last one is enough.
    """

    own_precision = True

    def set_up(self) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        site, size = self.site, self.site.settings.bucket_mb
        handlers = [] if size is None else [DistributedDataParallelKwargs(bucket_cap_mb=size)]
        self.accelerator = Accelerator(
            cpu=not site.on_cuda,
            mixed_precision="bf16" if site.settings.dtype == "bf16" else "no",
            gradient_accumulation_steps=site.settings.micro_batches_per_rank,
            kwargs_handlers=handlers,
        )
        optimizer = site.optimizer(self.model)
        self.called, self.optimizer = self.accelerator.prepare(self.model, optimizer)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return self.accelerator.accumulate(self.called)

    def differentiate(self, loss: Tensor, count: int) -> None:
        self.accelerator.backward(loss)

    def clip(self) -> None:
        self.accelerator.clip_grad_norm_(self.called.parameters(), CLIP_NORM)

    def close(self) -> None:
        """Accelerate keeps what it prepared, and the process group, for the life of the process."""
        self.accelerator.free_memory()
        self.accelerator.state._reset_state(reset_partial_state=True)


class Fabricated(Entrant):
    """Lightning Fabric, as its users write a loop: `Fabric.setup`, `backward`, `clip_gradients`; it
    uses the existing process group."""

    own_precision = True

    def set_up(self) -> None:
        from lightning_fabric import Fabric
        from lightning_fabric.plugins.environments import TorchElasticEnvironment
        from lightning_fabric.strategies import DDPStrategy

        # Its import messages do not belong in a table.
        logging.getLogger("lightning_fabric").setLevel(logging.ERROR)
        site, size = self.site, self.site.settings.bucket_mb
        options = {} if size is None else {"bucket_cap_mb": size}
        # Over the existing ranks, however started.
        strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), **options)
        self.fabric = Fabric(
            accelerator="cuda" if site.on_cuda else "cpu",
            devices=site.world.local_world_size,
            num_nodes=site.world.num_nodes,
            strategy=strategy,
            precision="bf16-mixed" if site.settings.dtype == "bf16" else "32-true",
        )
        self.fabric.launch()
        self.called, self.optimizer = self.fabric.setup(self.model, site.optimizer(self.model))

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return self.fabric.no_backward_sync(self.called, enabled=not last)

    def differentiate(self, loss: Tensor, count: int) -> None:
        self.fabric.backward(loss / count)

    def clip(self) -> None:
        self.fabric.clip_gradients(self.called, self.optimizer, max_norm=CLIP_NORM)


class Synchronised(Entrant):
    """A strategy of the registry, used as `gradsync train` uses it."""

    def set_up(self) -> None:
        contestant, site = self.contestant, self.site
        options = given_options(contestant, site)
        self.period = options.get("inner_steps", 1)
        self.sync = replicate(self.model, site.world, strategy=contestant.name, **options)
        self.optimizer = site.optimizer(self.model)  # fsdp replaces the parameters
        self.learner = Learner(
            model=self.model,
            optimizer=self.optimizer,
            sync=self.sync,
            scaler=None,
            comm=site.comm,
            autocast=site.autocast(),
        )
        self.learner.prime((1, 2))

    def backward(self) -> None:
        self.learner.run_micro_batches(self.micro_batches)

    def update(self) -> None:
        result = self.sync.step(self.optimizer, clip_norm=CLIP_NORM)
        self.mean_loss = result.mean_loss


class InTheirLoop(Entrant):
    """A strategy of the registry in a plain loop: two lines replace DDP's."""

    def set_up(self) -> None:
        super().set_up()
        site, name = self.site, self.contestant.name
        own = given_options(self.contestant, site)
        self.sync = replicate(self.model, site.world, strategy=name, **own)

    def accumulating(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.sync.no_sync()


_OTHERS = {ALONE: Entrant, "torch_ddp": TorchDdp, "accelerate": Accelerated, "fabric": Fabricated}


def enter(contestant: Contestant, site: BenchSite) -> Entrant:
    """Build the contestant, see `Entrant`; all ranks of the set call this together."""
    ours = InTheirLoop if contestant.own_loop else Synchronised
    entrant = _OTHERS.get(contestant.name, ours)(contestant, site)
    pin_threads(site.settings.threads)  # Accelerate changes the number
    return entrant


def given_options(contestant: Contestant, site: BenchSite) -> dict[str, Any]:
    """Options of the contestant and of the trainer. A few steps represent many: by default, ranks
    synchronise once in each turn, and low rank begins at once."""
    settings = site.settings
    strategy = STRATEGIES[contestant.name]
    usual: dict[str, Any] = {"inner_steps": settings.num_steps, "start_powerSGD_iter": 2}
    if settings.host:
        usual |= _ON_HOST
    has_buckets = strategy.recipe is None or strategy.recipe.grouping == "buckets"
    if settings.bucket_mb is not None and has_buckets:
        usual["bucket_mb"] = settings.bucket_mb
    known = {name: value for name, value in usual.items() if name in strategy.options}
    options = {**known, **contestant.options}
    return options if contestant.own_loop else trainer_options(contestant.name, options)
