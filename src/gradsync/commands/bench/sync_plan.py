"""The measurement of training steps as checked values: a model, contestants, the order of turns.

    none          plain torch without communication: the ideal
    NAME          a strategy of the registry, used as its documentation says
    torch_ddp     torch's DistributedDataParallel, as torch's own tutorial writes the loop
    accelerate    Hugging Face Accelerate, in its own idiom
    fabric        Lightning Fabric, in its own idiom

A name may carry options: `bucketed:bucket_mb=1,collective=gloo`. With `loop=user` a strategy runs
in a plain loop that calls `loss.backward()` and `optimizer.step()` instead of `sync.step`.

    round 0    none  naive  flat  …                a turn: some steps to warm up, then `num_steps`
    round 1    naive  flat  …  none                the next round begins with the next contestant
    round 2    flat  …  none  naive

Contestants with the same number of ranks share processes, a *set*. All sets stay alive; one works
at a time, the others sleep. All keep freed memory, as `gradsync train` does. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from statistics import fmean
from typing import Any, Literal

from gradsync.commands.arguments import check_least
from gradsync.commands.models.config import PRESETS, GPTConfig, preset
from gradsync.commands.plan.machine import may_have_gpu
from gradsync.commands.train.config import listed, with_options
from gradsync.core.files import check_name
from gradsync.errors import ConfigError
from gradsync.runtime.machine import available_bytes
from gradsync.sync.registry import STRATEGIES, check_options

DeviceName = Literal["auto", "cpu", "cuda"]
Dtype = Literal["fp32", "bf16"]
ALONE = "none"
OTHERS = ("torch_ddp", "accelerate", "fabric")
_PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}  # extra `bench`
_SEVERAL = {
    "default": ("naive", "flat", "overlap", "bucketed", "invariant", *OTHERS),
    "all": (*STRATEGIES, *OTHERS),
}
CHECKED = "all contestants train as they should; measuring"  # printed between checks and turns
_USUAL_TOKENS = 512
_SHARE = 0.5  # fraction of the free memory for models; steps take the rest
_BYTES = 20  # of a parameter: weight, gradient, AdamW's two moments and bucket, fp32

Ranks = Sequence[Mapping[str, Any]]  # per rank: what `run_plan` found for a contestant
Results = Sequence[Mapping[str, Any]]  # per set: what `run_plan` returned


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSettings:
    """How each contestant is measured; invalid numbers are refused."""

    model_size: str  # a preset of `gradsync.commands.models.presets`
    vocab_size: int | None = None  # number of token ids; None takes the preset's
    context_length: int | None = None  # tokens of a sequence; None: the model's own, at most 512
    num_steps: int = 10  # optimizer steps of a turn that count
    num_warmup: int = 2  # optimizer steps of a turn before those
    rounds: int = 5  # turns of each contestant
    micro_batches_per_rank: int = 1  # in a step
    dtype: Dtype = "bf16"  # bf16 is autocast over fp32 weights
    threads: int = 1  # intra-op threads of a rank
    device: DeviceName = "auto"
    side_by_side: bool = True  # models stay from turn to turn; else each turn builds its own
    host: bool = False  # shrink the model to a width of 8, so that computing costs nothing

    def __post_init__(self) -> None:
        preset(self.model_size)
        check_least(self, num_steps=1, num_warmup=0, rounds=1, micro_batches_per_rank=1, threads=1)
        longest = self.config.block_size
        if not 1 <= self.tokens <= longest:
            raise ConfigError(
                f"--context-length {self.context_length}: {self.model_size!r} takes 1 to {longest} "
                "tokens"
            )

    @property
    def config(self) -> GPTConfig:
        """The model's shape; with `host` it keeps its number of tensors, each almost empty."""
        shape = PRESETS[self.model_size]
        if self.host:
            small = {"n_head": 1, "n_kv_head": None, "n_embd": 8, "hidden_dim": 8}
            return replace(shape, **small, vocab_size=64, block_size=16)
        return shape if self.vocab_size is None else replace(shape, vocab_size=self.vocab_size)

    @property
    def bucket_mb(self) -> float | None:
        """Size of all contestants' buckets in MiB; None: each one's default. With `host` the size
        at which the shrunk model has as many buckets as the whole one has at 25 MiB."""
        if not self.host:
            return None
        return 25.0 * self.config.num_params() / PRESETS[self.model_size].num_params()

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        usual = min(_USUAL_TOKENS, self.config.block_size)
        return usual if self.context_length is None else self.context_length

    @property
    def model_text(self) -> str:
        """Model and precision, for titles."""
        millions = self.config.num_params() / 1e6
        how = ", 8 wide" if self.host else f" ({millions:.1f} M parameters)"
        return f"GPT {self.model_size}{how}, {self.dtype}"

    @property
    def turns_text(self) -> str:
        """How often, for titles."""
        return f"{self.rounds} rounds of {self.num_steps} steps"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One row of the table."""

    label: str  # its name in the table; unique
    name: str  # a strategy of the registry, `none`, or one of `OTHERS`
    options: Mapping[str, Any] = field(default_factory=dict)
    own_loop: bool = False  # for our strategies: whether to use the `loop=user` loop
    world_size: int = 1
    batch_size: int = 1  # sequences of a rank and step


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchPlan:
    """The whole measurement."""

    settings: SyncSettings
    contestants: tuple[Contestant, ...]

    def __post_init__(self) -> None:
        count = self.settings.micro_batches_per_rank
        for each in self.contestants:
            check_least(each, world_size=1, batch_size=1)
            if each.batch_size % count:
                raise ConfigError(
                    f"--batch-size {each.batch_size} does not divide into {count} micro-batches"
                )

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Ranks of each set."""
        return tuple(dict.fromkeys(each.world_size for each in self.contestants))

    def turns(self) -> list[Contestant]:
        """Each round begins with the next contestant; every other round is reversed, so that none
        always follows the same one."""
        order, every = [], self.contestants
        for first in range(self.settings.rounds):
            places = (first - n if first % 2 else first + n for n in range(len(every)))
            order += [every[place % len(every)] for place in places]
        return order

    def ranks(self, results: Results, contestant: Contestant) -> Ranks:
        """Measurements of `contestant`, by rank."""
        found = results[self.world_sizes.index(contestant.world_size)]
        return found["contestants"][contestant.label]


def parse_contestants(text: str) -> list[Contestant]:
    """The checked contestants, without `none`; `default` and `all` skip missing packages."""
    chosen: list[Contestant] = []
    for word in listed(text):
        if word in _SEVERAL:
            chosen += [_contestant(name) for name in _SEVERAL[word] if not _missing(name)]
        elif word != ALONE:
            chosen.append(_contestant(word))
    if not chosen and ALONE not in listed(text):
        raise ConfigError("--strategies: name at least one contestant")
    labels = [each.label for each in chosen]
    for each in chosen:
        if labels.count(each.label) > 1:
            raise ConfigError(f"--strategies: {each.label} is named twice")
        if _missing(each.name):
            raise ConfigError(
                f"contestant {each.name!r} needs the package {_PACKAGES[each.name]}: "
                "pip install 'gradsync[bench]'"
            )
    return chosen


def _missing(name: str) -> bool:
    return name in _PACKAGES and find_spec(_PACKAGES[name]) is None


def _contestant(word: str) -> Contestant:
    name, options = with_options(word)
    check_name("contestant", name, (*STRATEGIES, *OTHERS))
    if name not in STRATEGIES:
        if options and name in _PACKAGES:  # torch refuses what it does not know itself
            raise ConfigError(f"{name} takes no options, got {word}")
        return Contestant(label=word, name=name, options=options)
    loop = options.pop("loop", "sync.step")
    if loop not in ("user", "sync.step"):
        raise ConfigError(f"{name}: loop must be user or sync.step, got {loop!r}")
    check_options(STRATEGIES[name], options)
    return Contestant(label=word, name=name, options=options, own_loop=loop == "user")


def bench_plan(
    settings: SyncSettings, chosen: Sequence[Contestant], world_size: int, batch_size: int
) -> BenchPlan:
    """`none` and the chosen contestants on as many ranks."""
    every = (Contestant(label=ALONE, name=ALONE), *chosen)
    made = (replace(each, world_size=world_size, batch_size=batch_size) for each in every)
    return BenchPlan(settings=settings, contestants=tuple(made))


def turns(by_rank: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """For each round the mean over its steps, of the rank whose mean is the greatest; `by_rank` is
    [rank][round][step]. Not step by step: ranks that never synchronise do not wait for the slowest.
    """
    return [max(map(fmean, ranks)) for ranks in zip(*by_rank, strict=True)]


def step_seconds(ranks: Ranks, part: str = "step_s") -> list[float]:
    """Each round's mean on the slowest rank, see `turns`; `part` is step_s or compute_s."""
    return turns([rank[part] for rank in ranks])


def uses_cuda(device: DeviceName) -> bool:
    """Whether accelerators will compute; a missing one is refused."""
    if device == "cpu" or (device == "auto" and not may_have_gpu()):
        return False
    import torch

    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise ConfigError("--device cuda: torch finds no CUDA device here; take cpu or auto")
    return found


def side_by_side(settings: SyncSettings, *, ranks: int, models: int) -> SyncSettings:
    """`settings`, in which models stay from turn to turn if all `ranks` of a host can hold `models`
    models each; a GPU has one rank."""
    usable = _SHARE * available_bytes()
    if uses_cuda(settings.device):
        import torch

        usable, ranks = _SHARE * torch.cuda.get_device_properties(0).total_memory, 1
    held = ranks * models * _BYTES * settings.config.num_params()
    return replace(settings, side_by_side=held <= usable)
