"""Model, optimizer and synchronisation of a run: how they step, save and load."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from gradsync.comm.base import Communicator
from gradsync.comm.values import all_sum
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, loss_sum
from gradsync.commands.train.config import OptimConfig, TrainConfig
from gradsync.commands.train.learnt import Keep, Whole, load_learnt, save_replica, save_shares
from gradsync.data.loader import EvalLoader
from gradsync.data.micro_batch import MicroBatch
from gradsync.errors import ConfigError, RunError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.sync.step_metadata import LossSum
from gradsync.world import World

Autocast = AbstractContextManager[Any]
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


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set `lr` in every group, for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True, kw_only=True, slots=True)
class Learner:
    """A replica and its part in the run; `SplitLearner` has the same methods."""

    model: GPT
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    scaler: Any  # `torch.amp.GradScaler` for fp16, else None
    comm: Communicator  # All ranks
    autocast: Autocast  # Mixed precision of a forward

    @property
    def parameter_names(self) -> list[str]:
        """Names of the whole model's parameters, in its order."""
        return [name for name, _ in self.model.named_parameters()]

    def run_leaves(self, leaves: Iterable[MicroBatch], span: Span = record_function) -> None:
        """Forward and backward of this rank's leaves of a step, each in a `span`."""
        sync, kind = self.sync, self.model.embed.weight.device.type
        # Autocast keeps its casts of weights until the outermost context ends: one cast serves all
        # leaves but the last, whose gradients are sent while backward runs. Not used if memory
        # matters more.
        once = sync.replica.whole_parameters and not self.model.activation_checkpointing
        with torch.autocast(kind, enabled=False) if once else nullcontext():
            for leaf in leaves:
                if leaf.is_last:  # autograd runs an older forward's nodes last
                    torch.clear_autocast_cache()
                # All ranks know before the forward whether this backward synchronises.
                with sync.micro_step(last=leaf.is_last, index=leaf.index):
                    with span("forward"), self.autocast:
                        loss = summed_loss(sync.forward, self.model, leaf.inputs, leaf.targets)
                    with span("backward"):
                        sync.backward(
                            loss, weight=leaf.num_targets, reduction="sum", scale=self.scaler
                        )

    def prime(self, leaf_shape: tuple[int, int]) -> None:
        """Record what a strategy learns from its first backward; see `GradientSync.prime`."""
        device = self.model.embed.weight.device
        tokens = torch.zeros(leaf_shape, dtype=torch.int64, device=device)

        def forward_backward() -> None:
            with self.autocast:
                loss = summed_loss(self.sync.forward, self.model, tokens, tokens)
            loss.backward()

        self.sync.replica.prime(forward_backward)

    def evaluate(self, leaves: EvalLoader) -> float:
        """See the function `evaluate`."""
        spread = not self.sync.replica.whole_parameters
        return evaluate(self.model, leaves, self.comm, self.autocast, equal_forwards=spread)

    def save(self, step: int, keep: Keep) -> None:
        """Pass the trained state to `keep`, on rank 0; all ranks call it. Tensors that are sharded
        over ranks are never whole on one.
        """
        held = self.sync.replica.sharded_state_dict(self.optimizer)
        if held is None:
            save_replica(self, step, keep)
        else:
            save_shares(self, held, step, keep)

    def load(self, saved: Mapping[str, Whole], optimizer_state: Mapping[str, Any]) -> None:
        """Load weights, optimizer and strategy from what rank 0 has read. All ranks call it with
        the state that is no tensor. `saved`: whole tensors by kind and name on rank 0, else {}.
        """
        load_learnt(self, saved, optimizer_state)

    def whole_model(self, weights: Whole) -> GPT:
        """A model that one rank can use alone: the trained model, or a copy of a sharded one."""
        if self.sync.replica.whole_parameters:
            return self.model
        model = GPT(self.model.config, seed=0)
        model.load_state_dict(weights)
        return model

    def closing_figures(self, memory_gib: float) -> dict[str, Any]:
        """More entries for the summary; all ranks call it at the end of the run."""
        return {}


def summed_loss(
    forward: Callable[..., Tensor], model: Any, inputs: Tensor, targets: Tensor
) -> Tensor:
    """Loss summed over the targets; the model computes it if it must not keep all logits."""
    return forward(inputs, targets) if model.loss_rows else loss_sum(forward(inputs), targets)


@torch.no_grad()
def evaluate(
    model: GPT,
    leaves: EvalLoader,
    comm: Communicator,
    autocast: Autocast,
    *,
    equal_forwards: bool = False,
) -> float:
    """Mean loss per target over the evaluation set, nats, the same on all ranks. Every sample
    counts once, with no padded duplicates.

    Ranks may have different numbers of leaves: no rank communicates until its leaves are done, then
    one all-reduce sums loss, targets and samples (see `LossSum`). It calls the model, not its
    wrapper, whose forward would communicate. With `equal_forwards` all ranks call the model equally
    often and discard some results: if parameters are sharded, a forward takes all ranks.

    Raises:
        RunError: the number of samples counted is not that of the set, or no target counts.
    """
    was_training = model.training
    model.eval()
    device = model.embed.weight.device
    total, samples = LossSum(device), 0
    try:
        for leaf in leaves:
            with autocast:
                loss = summed_loss(model, model, leaf.inputs, leaf.targets)
            total.add(loss, leaf.num_targets)
            samples += leaf.num_samples
        for _ in range(leaves.most - len(leaves) if equal_forwards else 0):
            with autocast:
                model(torch.zeros((1, 1), dtype=torch.int64, device=device))
    finally:
        model.train(was_training)
    *summed, num_samples = all_sum(comm, *total.message(), samples)
    total_loss, num_targets = total.over_ranks(comm, summed)
    if num_samples != leaves.total_samples:
        raise RunError(
            f"evaluation counted {num_samples:.0f} samples, the set has {leaves.total_samples}"
        )
    if not num_targets:
        raise RunError("the evaluation set has no target that counts: all of them are -100")
    return float(total_loss) / num_targets


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
