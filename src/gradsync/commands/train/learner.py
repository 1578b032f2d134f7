"""Model, optimizer and synchronisation of a run: how they step, save and load."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.evaluation import Autocast, evaluate, summed_loss
from gradsync.commands.models.gpt import GPT
from gradsync.commands.train.config import OptimConfig, TrainConfig
from gradsync.commands.train.saving import Trained
from gradsync.data.loader import EvalLoader
from gradsync.data.micro_batch import MicroBatch
from gradsync.errors import ConfigError
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.world import World

Span = Callable[[str], AbstractContextManager[Any]]
"""Encloses a named part of a step."""


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters: matrices decay, vectors (norm weights) do not.

    Fused if the device has the kernel (CPU and CUDA do): one pass over the parameters.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.fused,
    )


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based) of `total_steps`; it has no state to save.

        lr │  /‾‾‾\\              │  /‾‾‾‾‾‾‾‾\\
           │ /      ‾‾\\__        │ /          \\
           └──────────────        └──────────────
             cosine                 wsd

    The first step uses peak / warmup_steps, step `warmup_steps` the peak, the last one
    peak x min_lr_ratio. Sources: cosine arXiv 1608.03983, wsd arXiv 2404.06395.
    """
    warmup = min(config.warmup_steps, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    floor = config.lr * config.min_lr_ratio
    if config.schedule == "constant":
        return config.lr
    last = total_steps - 1
    if config.schedule == "cosine":
        progress = (step - warmup) / max(last - warmup, 1)
        return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    decay = max(min(round(config.decay_fraction * total_steps), last - warmup), 1)
    progress = (step - (last - decay)) / decay
    return config.lr + (floor - config.lr) * min(max(progress, 0.0), 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner(Trained):
    """A replica and its part in the run; `SplitLearner` has the same methods."""

    scaler: Any  # `torch.amp.GradScaler` for fp16, else None
    autocast: Autocast  # Mixed precision of a forward

    def run_micro_batches(
        self, micro_batches: Iterable[MicroBatch], span: Span = record_function
    ) -> None:
        """Forward and backward of this rank's micro-batches of a step, each in a `span`."""
        sync, kind = self.sync, self.model.embed.weight.device.type
        # Autocast keeps its casts of weights until the outermost context ends: one cast serves all
        # micro-batches but the last, whose gradients are sent while backward runs. Not used if
        # memory matters more.
        once = sync.replica.whole_parameters and not self.model.activation_checkpointing
        with torch.autocast(kind, enabled=False) if once else nullcontext():
            for mine in micro_batches:
                if mine.is_last:  # autograd runs an older forward's nodes last
                    torch.clear_autocast_cache()
                # All ranks know before the forward whether this backward synchronises.
                with sync.micro_step(last=mine.is_last, index=mine.index):
                    with span("forward"), self.autocast:
                        loss = summed_loss(sync.forward, self.model, mine.inputs, mine.targets)
                    with span("backward"):
                        sync.backward(
                            loss, weight=mine.num_targets, reduction="sum", scale=self.scaler
                        )

    def prime(self, shape: tuple[int, int]) -> None:
        """Record what a strategy learns from its first backward; see `GradientSync.prime`. `shape`
        is that of a micro-batch."""
        device = self.model.embed.weight.device
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)

        def forward_backward() -> None:
            with self.autocast:
                loss = summed_loss(self.sync.forward, self.model, tokens, tokens)
            loss.backward()

        self.sync.prime(forward_backward)

    def evaluate(self, loader: EvalLoader) -> float:
        """Mean loss per target over the validation set, nats, the same on all ranks."""
        spread = not self.sync.replica.whole_parameters
        return evaluate(self.model, loader, self.comm, self.autocast, equal_forwards=spread)


def build_learner(
    config: TrainConfig, world: World, shape: GPTConfig, comm: Communicator
) -> Learner:
    """Model, optimizer and synchronisation on this rank's device."""
    device = world.device
    if config.dtype == "fp16" and device.type != "cuda":
        raise ConfigError("dtype fp16 needs CUDA; use bf16 or fp32 on a CPU")
    model = GPT(
        shape,
        seed=config.seed,
        activation_checkpointing=config.activation_checkpointing,
        loss_rows=config.loss_rows,
    ).to(device)
    options = trainer_options(config.sync, config.sync_options.given())
    if config.compile == "ddp":
        options["compile_wrapper"] = True
    if config.compile == "model":
        compile_blocks(model)
    sync = replicate(model, world, strategy=config.sync, comm=comm, **options)
    # After replication: it may replace parameters by sharded ones.
    optimizer = build_optimizer(model, config.optim)
    scaler = None
    if config.dtype == "fp16":
        # Losses are sums over a step's targets: lower the start scale by as many powers of two.
        start = 2.0 ** (16 - (config.tokens_per_update - 1).bit_length())
        scaler = torch.amp.GradScaler("cuda", init_scale=start)
    return Learner(
        model=model,
        optimizer=optimizer,
        sync=sync,
        scaler=scaler,
        comm=comm,
        autocast=autocast(config, world),
    )


def compile_blocks(model: GPT) -> None:
    """Compile each block, in place: names stay clean. A graph of the whole model has one backward
    and gives all gradients at its end, when no computation is left to hide communication. One rank
    does the same, or its bits would differ from those on two."""
    for block in model.blocks:
        block.compile()


def trainer_options(sync: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options `given` for the strategy `sync`, plus the trainer's.

    Between two steps nothing writes the trainer's weights, so ranks that share a host's memory need
    only one copy of them; `update="whole"` needs more. Every read of the weights waits for them, so
    between hosts they may be updated while the next forward runs, if that pays.
    """
    if STRATEGIES[sync].recipe is None:
        return dict(given)
    own: dict[str, Any] = {"overlap_publish": "auto"}
    return own | ({} if given.get("update") == "whole" else {"weights": "shared"}) | dict(given)


@contextmanager
def kernels(config: TrainConfig, world: World) -> Generator[None]:
    """On a GPU: TF32 for fp32 matrix products as configured, and deterministic kernels under a
    strategy that promises bits, because attention and embedding otherwise add with atomics."""
    if world.device.type != "cuda":
        yield
        return
    promised = STRATEGIES[config.sync].same_on_any_ranks
    memory: Any = torch.utils.deterministic
    before = (
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        memory.fill_uninitialized_memory,
    )
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    torch.use_deterministic_algorithms(promised or before[1])
    memory.fill_uninitialized_memory = False  # every buffer is written before it is read
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.use_deterministic_algorithms(before[1])
        memory.fill_uninitialized_memory = before[2]


def autocast(config: TrainConfig, world: World) -> Autocast:
    """The mixed-precision context of a forward."""
    if config.dtype == "fp32":
        return nullcontext()
    dtype = torch.bfloat16 if config.named_dtype == "bf16" else torch.float16
    return torch.autocast(world.device.type, dtype=dtype)
