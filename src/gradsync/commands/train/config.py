"""A training run as one frozen value. No torch here: `--help` must be quick. Files set `Fixed`
fields; there is no flag for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any, Literal, cast, get_args

from tyro.conf import Fixed, Suppress
from tyro.constructors import PrimitiveConstructorSpec

from gradsync.commands.models.config import GPTConfig, preset
from gradsync.commands.parallel.layout import ParallelLayout, parse_layout
from gradsync.commands.train.trackers import tracker_names
from gradsync.core.files import check_name
from gradsync.data.batch_plan import BatchPlan, require_at_least, solve_batch_plan
from gradsync.errors import ConfigError
from gradsync.runtime.bounds import check_times
from gradsync.sync.options import every_option

Dtype = Literal["auto", "bf16", "fp32", "fp16"]
CompileOrder = Literal["none", "model", "ddp"]

AUTO = "auto"  # What `gradsync tune` found for this kind of run: strategy and options.


_LEAST = {
    0: ("num_workers", "sample_tokens", "check_replicas_every", "profile", "rejoin"),
    1: (
        *("steps", "tokens_per_update", "micro_batch_size", "log_every"),
        *("silence_s", "threads", "nproc_per_node", "seq_len"),
    ),
}
"""Smallest allowed values of numbers in `TrainConfig`."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """AdamW (arXiv 1711.05101) and its learning-rate schedule."""

    lr: float = 6e-4
    """Peak learning rate; with lr_scaling, the peak for a batch of lr_base_batch tokens."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale lr with tokens_per_update / lr_base_batch: linear (SGD, arXiv 1706.02677), or sqrt,
    with its square root (arXiv 1404.5997; for Adam arXiv 2205.10343). The final learning rate
    scales too; the number of warm-up steps does not."""
    lr_base_batch: int | None = None
    """Tokens per update at which lr was found; required by lr_scaling."""
    min_lr_ratio: Fixed[float] = 0.1  # Final learning rate as a fraction of the peak.
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """cosine (arXiv 1608.03983), wsd = warm-up, stable, decay (arXiv 2404.06395), or constant."""
    warmup_steps: int = 100  # Linear warm-up, optimizer steps; at most `steps`.
    decay_fraction: Fixed[float] = 0.2
    """wsd: fraction of all steps over which the learning rate falls linearly."""
    weight_decay: float = 0.1  # Decay of matrices and embeddings; vectors (norms) are not decayed.
    beta1: Fixed[float] = 0.9  # Decay of the first moment.
    beta2: Fixed[float] = 0.95  # Decay of the second moment.
    eps: Fixed[float] = 1e-8  # Added to the root of the second moment.
    clip_norm: float | None = 1.0  # Largest L2 norm of the mean gradient; None does not clip.
    fused: bool = True  # Torch's fused AdamW kernel.

    def __post_init__(self) -> None:
        _require(
            (self.lr_scaling == "none") == (self.lr_base_batch is None),
            f"optim.lr_scaling={self.lr_scaling} and optim.lr_base_batch={self.lr_base_batch}: "
            "give both (lr_base_batch: tokens of an update for which lr was found), or neither",
        )
        base, clip = self.lr_base_batch, self.clip_norm
        for name, holds, rule in (
            ("lr", 0 < self.lr < float("inf"), "a positive number"),
            ("lr_base_batch", base is None or base >= 1, "at least 1"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in 0..1"),
            ("warmup_steps", self.warmup_steps >= 0, "at least 0"),
            ("decay_fraction", 0 < self.decay_fraction <= 1, "in 0..1, 0 excluded"),
            ("clip_norm", clip is None or clip > 0, "positive, or None for no clipping"),
        ):
            _require(holds, f"optim.{name} must be {rule}; got {getattr(self, name)}")

    def scaled(self, tokens_per_update: int) -> OptimConfig:
        """The same with lr scaled for `tokens_per_update`, and nothing left to scale."""
        if self.lr_base_batch is None:
            return self
        ratio = tokens_per_update / self.lr_base_batch
        lr = self.lr * (ratio if self.lr_scaling == "linear" else math.sqrt(ratio))
        return replace(self, lr=lr, lr_scaling="none", lr_base_batch=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Exact evaluation on the validation split, shared by all ranks."""

    every: int = 100
    """Optimizer steps between evaluations; one more follows the last step. 0: only that one. Under
    local_sgd and diloco an evaluation ends the round, so this is part of the run's definition."""
    max_tokens: int | None = 65_536
    """Evaluate on the first max_tokens tokens (rounded down to whole sequences); None for all."""

    def __post_init__(self) -> None:
        require_at_least(0, **{"eval.every": self.every})
        require_at_least(1, **{"eval.max_tokens": self.max_tokens})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save, and how many checkpoints to keep."""

    every: int = 200
    """Optimizer steps between checkpoints; one more follows the last step. 0: only that one. Under
    local_sgd and diloco a checkpoint ends the round, so this is part of the run's definition."""
    keep_last: int = 2  # Good checkpoints to keep, at least 1.
    keep_best: int = 0
    """Also keep this many with the lowest validation loss, of those saved right after an
    evaluation."""
    async_save: bool = True
    """Write while training goes on; a step waits for a copy of the tensors only. If ranks divide
    state or weights, training waits for the write."""

    def __post_init__(self) -> None:
        require_at_least(0, **{"checkpoint.every": self.every})
        require_at_least(0, **{"checkpoint.keep_best": self.keep_best})
        require_at_least(1, **{"checkpoint.keep_last": self.keep_last})


class _GivenOptions:
    """Options of the synchronisation strategy; by default the strategy chooses. A strategy accepts
    only its options, checked by name."""

    def given(self) -> dict[str, Any]:
        """The options that are set."""
        values = {each.name: getattr(self, each.name) for each in fields(cast(Any, self))}
        return {name: value for name, value in values.items() if value is not None}


SyncConfig: Any = make_dataclass(
    "SyncConfig",
    [(name, hint | None, field(default=None)) for name, (hint, _) in every_option().items()],
    bases=(_GivenOptions,),
    namespace={"__doc__": _GivenOptions.__doc__, "__module__": __name__},
    frozen=True,
    kw_only=True,
)
"""Every option of every strategy, as `sync/options.py` declares it."""


def listed(text: str) -> list[str]:
    """Split `a,b:key=value,key=value,c` at commas; `key=value` belongs to the name before it."""
    words: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        is_option = "=" in part and ":" not in part.partition("=")[0]
        if is_option and words:
            words[-1] += ("," if ":" in words[-1] else ":") + part
        else:
            words.append(part)
    return words


def with_options(word: str) -> tuple[str, dict[str, Any]]:
    """The name in `name:key=value,key=value`, and its options, unchecked.

    Raises:
        ConfigError: a part that is not `key=value`.
    """
    name, _, rest = word.partition(":")
    return name, dict(key_and_value(name, part) for part in rest.split(",") if part)


def key_and_value(name: str, part: str) -> tuple[str, Any]:
    """The option in `key=value`; ConfigError, which names whose it is, for other text."""
    key, equals, value = part.partition("=")
    if not (key and equals and value):
        raise ConfigError(f"{name}: option {part!r} is not key=value")
    words = {"true": True, "false": False, "none": None}
    if value.lower() in words:
        return key, words[value.lower()]
    for kind in (int, float):
        with suppress(ValueError):
            return key, kind(value)
    return key, value


def sync_options(words: Sequence[str]) -> Any:
    """The `SyncConfig` of KEY=VALUE words; ConfigError for a key that no strategy has."""
    given: dict[str, Any] = {}
    known = every_option()
    for word in words:
        key, value = key_and_value("--sync-options", word)
        key = key.replace("-", "_")
        check_name("option of a strategy", key, known)
        is_word = value is None and "none" in get_args(known[key][0])
        given[key] = "none" if is_word else value
    return SyncConfig(**given)


_ON_THE_COMMAND_LINE = PrimitiveConstructorSpec[Any](
    nargs="*",
    metavar="KEY=VALUE …",
    instance_from_str=sync_options,
    is_instance=lambda value: isinstance(value, _GivenOptions),
    str_from_instance=lambda value: [f"{name}={given}" for name, given in value.given().items()],
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """A training run. Sizes are global: they mean the same on any number of ranks."""

    preset: Suppress[str] = "tiny"
    """Model preset that this configuration starts from; the first argument on the command line."""
    steps: int = 1000  # Optimizer steps.
    seed: int = 1337  # Determines initial weights, sample order and dropout.
    sync: str = "invariant"
    """Synchronisation strategy: invariant (the same bits on any number of ranks), bucketed, ddp,
    zero1 … (docs/guide/strategies.md lists them); auto uses what `gradsync tune` found for this
    kind of run on this machine, else invariant."""
    out: str = ""  # Run directory; empty makes runs/PRESET-DATE-TIME.
    data: str = ""
    """Directory with train.bin and val.bin; or a stream: FILE.jsonl, a folder or pattern of .jsonl
    files, hf:NAME[:CONFIG], hf:json:FILES (or csv, parquet, text). A stream's first documents are
    for validation. Empty: the Python standard library's source."""
    token_dtype: Fixed[str] = ""  # Token type without a meta.json: uint16 (if empty), uint32.
    text_key: str = "text"  # Streams: field that holds the text.
    tokenizer: str = ""  # Streams: prepared data directory whose tokenizer to use; empty: bytes.
    tokens_per_update: int = 524_288
    """Tokens per optimizer step over all ranks, whatever the world size."""
    micro_batch_size: int = 4  # Sequences per forward and backward.
    seq_len: int | None = None  # Tokens per sequence; default: the model's block_size.
    dtype: Dtype = "auto"
    """bf16 and fp16 use autocast over fp32 weights; fp16 needs CUDA. auto: bf16 if every rank
    multiplies it in hardware, else fp32; a resumed run keeps its dtype."""
    device: str = "auto"  # auto, cpu, cuda or cuda:N.
    backend: str = "auto"
    """Communication backend between ranks: gloo, nccl, mpi, or one per device such as
    cpu:gloo,cuda:nccl; auto uses gloo, and on CUDA also nccl."""
    tf32: bool = True  # CUDA: TF32 in fp32 matrix products.
    threads: int | None = None
    """Intra-op threads per rank; default: 1 under sync=invariant on a CPU (the number changes
    bits), else cores of the host / ranks on the host."""
    keep_memory: bool = True
    """CPU: memory that a step frees stays in the process for the next step, which saves page
    faults; the process stays at its peak size (Linux with glibc; no effect elsewhere)."""
    nproc_per_node: int | None = None
    """Start this many ranks on this host; default: join the launcher that started this process."""
    resume: str = "auto"
    """auto (continue the run in --out; --resume alone means auto), none (refuse to), or the path of
    a run or checkpoint."""
    init: str = ""
    """Initial weights, unless a run is resumed: a run, a checkpoint, or a folder of transformers (a
    Llama: config.json and *.safetensors). Their shape must be the model's."""
    allow_numeric_change: bool = False
    """Resume even if bits may differ: another torch, CPU, dtype, thread count …"""
    compile: CompileOrder = "none"
    """torch.compile: none, model (each of its blocks, so that communication overlaps; --compile
    alone means model) or ddp (around torch DDP)."""
    activation_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more compute."""
    num_workers: int = 0  # Data-loading processes per rank.
    log_every: int = 10
    """Optimizer steps between log entries: a printed line, an object in metrics.jsonl."""
    track: str = ""
    """Trackers that also get every record of metrics.jsonl: tensorboard, wandb, or both, separated
    by a comma; empty for none."""
    profile: int = 0
    """Trace this optimizer step and the next one: profile_trace/iteration_N/rankR_trace.json, for
    Perfetto (ui.perfetto.dev) and `gradsync report`; 0 for none."""
    check_replicas_every: int = 0
    """Optimizer steps between bitwise comparisons of all ranks' weights, made before a step's
    update can hide a difference; also before each checkpoint. 0 for none."""
    on_loss: Literal["end", "shrink"] = "end"
    """When a rank dies or is stopped: end; or shrink: the others form a new group, share its
    micro-batches, and go on with the same step (sync=invariant: the same bits)."""
    rejoin: int = 0
    """With on_loss=shrink: start a lost rank again, at most this often; the others save after their
    next step, and it joins them there."""
    timeout_s: float = 1800.0  # Longest duration of a collective, seconds.
    rendezvous_timeout_s: Fixed[float] = 60.0
    """Longest wait for the other ranks at the start, seconds."""
    silence_s: float = 10.0
    """Longest silence of another rank's host, seconds; then its connections count as cut
    (Linux)."""
    sample_tokens: int = 200  # Tokens of text to generate at the end; 0 for none.
    parallel: str = ""
    """Split the model: pp=2,dp=2 (two pipeline stages, two replicas), tp=2 (heads and SwiGLU over
    two ranks) …; the product of the sizes is the number of ranks, and dp may be left out. Empty:
    every rank has a replica."""
    model: GPTConfig = field(default_factory=GPTConfig)
    """Shape of the model; its vocabulary follows the data unless set."""
    optim: OptimConfig = field(default_factory=OptimConfig)  # Optimizer and schedule.
    eval: EvalConfig = field(default_factory=EvalConfig)  # Evaluation.
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # Checkpoints.
    sync_options: Annotated[SyncConfig, _ON_THE_COMMAND_LINE] = field(default_factory=SyncConfig)
    """Options of the strategy, such as bucket_mb=50 overlap=false; docs/guide/strategies.md lists
    them."""

    def __post_init__(self) -> None:
        check_times(self)
        tracker_names(self.track)
        for least, names in _LEAST.items():
            require_at_least(least, **{name: getattr(self, name) for name in names})
        _require(
            self.sequence_length <= self.model.block_size,
            f"seq_len {self.seq_len} is longer than model.block_size {self.model.block_size}",
        )
        _require(
            self.compile != "ddp" or self.sync == "ddp",
            f"compile=ddp wraps torch DDP, but sync={self.sync}; use compile=model",
        )
        _require(
            self.on_loss == "end" or not self.parallel,
            "on_loss=shrink needs a whole model on each rank; drop parallel",
        )
        _require(
            not self.rejoin or (self.on_loss == "shrink" and self.sync != AUTO),
            "rejoin needs on_loss=shrink and a named strategy, not sync=auto",
        )
        _require(
            self.sync != AUTO or not self.sync_options.given(),
            "sync=auto chooses options too; drop sync_options."
            f"{', sync_options.'.join(self.sync_options.given())}, or name the strategy",
        )

    def batch_plan(self, world_size: int) -> BatchPlan:
        """The exact batch arithmetic; the replicas of a split model share the micro-batches."""
        return solve_batch_plan(
            tokens_per_update=self.tokens_per_update,
            seq_len=self.sequence_length,
            micro_batch_size=self.micro_batch_size,
            world_size=self.layout(world_size).dp,
        )

    def layout(self, world_size: int) -> ParallelLayout:
        """How `world_size` ranks are divided."""
        return parse_layout(self.parallel, world_size)

    @property
    def named_dtype(self) -> Literal["bf16", "fp32", "fp16"]:
        """The dtype, after `auto` is resolved."""
        assert self.dtype != "auto"
        return self.dtype

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""
        return self.model.block_size if self.seq_len is None else self.seq_len


def recipe(name: str) -> TrainConfig:
    """The configuration that `gradsync train NAME` starts from: a model preset with a suitable
    batch and learning rate.
    """
    model = preset(name)
    if name == "tiny":
        return TrainConfig(
            preset=name,
            model=model,
            steps=300,
            tokens_per_update=4_096,
            micro_batch_size=2,  # 8 of 512 tokens: up to 8 ranks
            optim=OptimConfig(lr=3e-3, warmup_steps=20),
            eval=EvalConfig(every=100),
            checkpoint=CheckpointConfig(every=100),
        )
    # Peak learning rates fall with the width, as in GPT-3 (arXiv 2005.14165, table 2.1).
    rates = {"mini": 1e-3, "small": 6e-4, "medium": 3e-4, "large": 2.5e-4}
    rates |= {"xl": 2e-4, "1.3b": 2e-4, "2.7b": 1.6e-4}
    config = TrainConfig(preset=name, model=model, optim=OptimConfig(lr=rates[name]))
    if name == "mini":
        return replace(config, tokens_per_update=32_768, micro_batch_size=2)
    return config
