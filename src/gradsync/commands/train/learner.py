"""Model, optimizer and synchronisation of a run: how they step, save and load.

Whole replicas are saved as whole tensors. State that ranks divide (`zero1`, `zero2`, `fsdp`) has
one file per rank:

    part-00000-of-00002   optimizer/exp_avg/embed.weight  …      what rank 0 holds
    part-00001-of-00002   optimizer/exp_avg/embed.weight  …      what rank 1 holds
    model                 weights, if every rank has them whole (`zero1`, `zero2`)

Each rank sends its shares to rank 0, which writes them as they arrive and holds at most two of the
others' tensors. To load, rank 0 reads whole tensors from any checkpoint (whole replicas, a split
model, shares of another number of ranks), and sends each rank only its shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from gradsync.checkpoint.optimizer_state import (
    pack_optimizer,
    state_device,
    unpack_optimizer,
    unpack_settings,
)
from gradsync.checkpoint.pieces import (
    AnyPiece,
    InOrder,
    part_stem,
    piece_of_run,
    places_of,
    whole_piece,
)
from gradsync.checkpoint.weights import clean_name, clean_names, match_weights, pack_weights
from gradsync.comm.base import Communicator
from gradsync.comm.finite import non_finite
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.values import all_gather_json, broadcast_json, broadcast_tensors
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, Autocast, evaluate, loss_sum
from gradsync.commands.parallel.transfer import collect, describe, hand_out, layout_of
from gradsync.commands.train.config import OptimConfig, TrainConfig
from gradsync.data.loader import EvalLoader
from gradsync.data.micro_batch import MicroBatch
from gradsync.errors import ConfigError, DivergenceError
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.registry import STRATEGIES
from gradsync.sync.replicate import replicate
from gradsync.sync.shares import HeldState, Share
from gradsync.world import World

Span = Callable[[str], AbstractContextManager[Any]]
"""Encloses a named part of a step."""


Whole = Mapping[str, Tensor]
Keep = Callable[[Mapping[str, Whole], dict[str, Any], dict[str, Any]], None]
"""Saves tensors by file and name, the rest of the optimizer's state, and the tensors' places. It
saves at once: tensors belong to the run, or arrive while they are saved."""
Fingerprint = dict[str, str | int | float | bool | None]

RANDOM_STREAMS = "keyed by (seed, step, leaf), version 1"
ADVICE = "lower --optim.lr, look at the data of that step, or go back to an earlier checkpoint"

Placed = tuple[AnyPiece, Tensor]
"""A piece's place in its whole tensor, and the piece."""


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
class Learner:
    """A replica and its part in the run; `SplitLearner` has the same methods."""

    model: GPT
    optimizer: torch.optim.Optimizer
    sync: GradientSync
    comm: Communicator  # All ranks
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
                        loss = loss_sum(sync.forward(mine.inputs), mine.targets)
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
                loss = loss_sum(self.sync.forward(tokens), tokens)
            loss.backward()

        self.sync.prime(forward_backward)

    def evaluate(self, loader: EvalLoader) -> float:
        """Mean loss per target over the validation set, nats, the same on all ranks."""
        spread = not self.sync.replica.whole_parameters
        return evaluate(self.model, loader, self.comm, self.autocast, equal_forwards=spread)

    def save(self, step: int, keep: Keep) -> None:
        """Pass the trained state to `keep`, on rank 0; all ranks call it. Tensors that are sharded
        over ranks are never whole on one.
        """
        comm, replica = self.comm, self.sync.replica
        held = replica.sharded_state_dict(self.optimizer)
        if held is not None:
            self._save_shares(held, step, keep)
            return
        replica.gather(self.optimizer)
        weights = replica.full_weights()
        kept, state = pack_optimizer(self.optimizer, self.model.named_parameters())
        remembered = replica.state_tensors()
        # Under on_loss="shrink" each rank holds all, and a loss must not end the run here.
        among = comm if self.sync.world.recovery is None else SingleCommunicator()
        check_finite(among, step, chain(weights.items(), kept.items(), remembered.items()))
        if comm.rank == 0:
            tensors = {"model": pack_weights(weights), "optimizer": kept, "sync": remembered}
            keep(tensors, state, {})
        replica.scatter(self.optimizer)

    def _save_shares(self, held: HeldState, step: int, keep: Keep) -> None:
        """Each rank's shares; `held` is its `sharded_state_dict`."""
        replica = self.sync.replica
        # First: after a forward FSDP2 may still hold whole parameters in place of the sharded ones.
        weights = replica.sharded_weights()
        named = list(self.model.named_parameters())
        clean = clean_names(name for name, _ in named)
        names = {parameter: clean[name] for name, parameter in named}
        whole: dict[str, Whole] = {}
        if weights is None:
            whole["model"] = replica.full_weights()
        remembered = replica.state_tensors()
        placed = dict(chain(_placed_weights(weights or {}), _placed_state(held, names)))
        here = ((name, tensor) for name, (_, tensor) in placed.items())
        check_finite(
            self.comm, step, chain(here, whole.get("model", {}).items(), remembered.items())
        )
        note = {
            names[parameter]: {
                "slots": [slot for slot, value in state.items() if isinstance(value, Tensor)],
                "values": {s: value for s, value in state.items() if not isinstance(value, Tensor)},
            }
            for parameter, (_, state) in held.items()
            if state
        }

        def join(notes: list[Any]) -> dict[str, Any]:
            _, state = pack_optimizer(self.optimizer, named)
            for told in notes:
                for name, entry in told.items():
                    state["params"][name] |= entry
            return state

        if self.comm.rank == 0:
            if weights is None:
                whole["model"] = pack_weights(whole["model"])
            if remembered:
                whole["sync"] = remembered
        keep_parts(self.comm, placed, note, keep, join=join, whole=whole)

    def load(self, saved: Mapping[str, Whole], optimizer_state: Mapping[str, Any]) -> None:
        """Load weights, optimizer and strategy from what rank 0 has read. All ranks call it with
        the state that is no tensor. `saved`: whole tensors by kind and name on rank 0, else {}.
        """
        comm, replica, optimizer = self.comm, self.sync.replica, self.optimizer
        # Settings come from the configuration, state from the checkpoint.
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        held = replica.sharded_state_dict(optimizer)
        self.load_weights(saved.get("model", {}))
        named = list(self.model.named_parameters())
        whole = saved.get("optimizer", {})
        if held is None:
            unpack_optimizer(optimizer, named, broadcast_tensors(comm, whole), optimizer_state)
            replica.scatter(optimizer)
        else:
            states = self._states_of_shares(held, whole, optimizer_state)
            replica.scatter(optimizer, states)
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        replica.load_state_tensors(broadcast_tensors(comm, saved.get("sync")))

    def _states_of_shares(
        self, held: HeldState, whole: Whole, state: Mapping[str, Any]
    ) -> dict[Any, dict[str, Any]]:
        """The optimizer's state of each parameter that this rank holds a share of."""
        layout = layout_of(broadcast_json(self.comm, describe(whole)))
        named = list(self.model.named_parameters())
        states: dict[Any, dict[str, Any]] = {}
        runs: dict[str, list[tuple[int, int]]] = {}
        homes: dict[str, tuple[Tensor, str, torch.device]] = {}
        found = unpack_settings(self.optimizer, named, layout, state)
        for name, (parameter, group) in found.items():
            if parameter not in held:
                continue
            entry = state["params"][name]
            states[parameter] = dict(entry["values"])
            for slot in entry["slots"]:
                key = f"{slot}/{name}"
                share = held[parameter][0]
                runs[key] = [(share.start, share.stop)] if layout[key].dim() else [(0, 1)]
                homes[key] = parameter, slot, state_device(slot, parameter, group)
        got = hand_out(self.comm, whole or layout, runs)
        for key, (parameter, slot, device) in homes.items():
            value = got[key] if layout[key].dim() else got[key].view(())
            states[parameter][slot] = value.to(device)
        return states

    def load_weights(self, whole: Whole) -> None:
        """Load whole weights that rank 0 has; each rank keeps its part."""
        replica = self.sync.replica
        held = replica.sharded_weights()
        if held is None:
            weights = match_weights(
                self.model.state_dict(keep_vars=True), broadcast_tensors(self.comm, whole)
            )
            replica.load_full_weights(weights)
            return
        layout = layout_of(broadcast_json(self.comm, describe(whole)))
        match_weights(self.model.state_dict(keep_vars=True), layout)
        saved_as = {clean: name for name, clean in clean_names(layout).items()}
        sources = {name: saved_as.get(clean_name(name)) for name in held}  # None: tied to another
        runs = {
            source: [(held[name][0].start, held[name][0].stop)]
            for name, source in sources.items()
            if source is not None
        }
        got = hand_out(self.comm, whole or layout, runs)
        for name, source in sources.items():
            if source is not None:
                held[name][1].copy_(got[source])

    def whole_model(self, weights: Whole) -> GPT:
        """A model that one rank can use alone: the trained model, or a copy of a sharded one."""
        if self.sync.replica.whole_parameters:
            return self.model
        model = GPT(self.model.config, seed=0)
        model.load_state_dict(weights)
        return model


def build_learner(
    config: TrainConfig, world: World, shape: GPTConfig, comm: Communicator
) -> Learner:
    """Model, optimizer and synchronisation on this rank's device."""
    device = world.device
    if config.dtype == "fp16" and device.type != "cuda":
        raise ConfigError("dtype fp16 needs CUDA; use bf16 or fp32 on a CPU")
    recompute = config.activation_checkpointing
    model = GPT(shape, seed=config.seed, activation_checkpointing=recompute).to(device)
    given = config.sync_options.given()
    options = given if config.on_loss == "shrink" else trainer_options(config.sync, given)
    if config.compile == "ddp":
        options["compile_wrapper"] = True
    if config.compile == "model":
        # A graph of the whole model would give all gradients at its end, when no computation is
        # left to hide communication. One rank compiles blocks too, for the same bits as on two.
        for block in model.blocks:
            block.compile()  # in place: names stay clean
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


def check_finite(comm: Communicator, step: int, named: Iterable[tuple[str, Tensor]]) -> None:
    """Check what each rank holds before a checkpoint: two small all-gathers. Raises DivergenceError
    on all ranks if any holds nan or inf, which no run could resume from."""
    for rank, found in enumerate(all_gather_json(comm, non_finite(named))):
        if found:
            raise DivergenceError(
                f"after step {step} there is nan or inf in {found} (rank {rank}), so it is not "
                f"saved; {ADVICE}"
            )


def keep_parts(
    comm: Communicator,
    placed: Mapping[str, Placed],
    note: Any,
    keep: Keep,
    *,
    join: Callable[[list[Any]], dict[str, Any]],
    whole: Mapping[str, Whole],
) -> None:
    """Every rank's tensors, one file a rank, after the `whole` ones; all ranks of `comm` call it.
    `join` makes the optimizer's state of all ranks' notes, which JSON can write."""
    tensors = {name: tensor for name, (_, tensor) in placed.items()}
    places = places_of({name: piece for name, (piece, _) in placed.items()})
    notes, parts = collect(comm, tensors, [places, note])
    if comm.rank:
        return
    stems = [part_stem(index, comm.world_size) for index in range(comm.world_size)]
    contents = chain(whole.values(), parts)
    files = InOrder([*whole, *stems], lambda _: next(contents))
    found = {stem: places for stem, (places, _) in zip(stems, notes, strict=True)}
    keep(files, join([one for _, one in notes]), found)


def _placed_weights(weights: Mapping[str, tuple[Share, Tensor]]) -> Iterator[tuple[str, Placed]]:
    clean = clean_names(weights)
    seen: set[int] = set()
    for name, (share, tensor) in weights.items():
        is_new = not tensor.numel() or tensor.data_ptr() not in seen  # tied tensors once
        seen.add(tensor.data_ptr())
        if share.saves and is_new:
            yield f"model/{clean[name]}", _place(share, tensor)


def _placed_state(held: HeldState, names: Mapping[Any, str]) -> Iterator[tuple[str, Placed]]:
    for parameter, (share, state) in held.items():
        for slot, value in state.items():
            if isinstance(value, Tensor) and share.saves and (value.dim() or not share.start):
                placed = _place(share, value) if value.dim() else (whole_piece(()), value)
                yield f"optimizer/{slot}/{names[parameter]}", placed


def _place(share: Share, flat: Tensor) -> Placed:
    piece = piece_of_run(share.shape, share.start, share.stop)
    return piece, flat.reshape(piece.shape)
