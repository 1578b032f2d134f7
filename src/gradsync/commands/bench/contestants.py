"""Contestants of a measurement: names, options, allocator settings. No torch here.

    none          plain torch without communication: the ideal
    NAME          a strategy of the registry, used as its documentation says
    torch_ddp     torch's DistributedDataParallel, as torch's own tutorial writes the loop
    accelerate    Hugging Face Accelerate, in its own idiom
    fabric        Lightning Fabric, in its own idiom

A name may carry options: `bucketed:bucket_mb=1,collective=gloo`. With `loop=user` a strategy runs
in a plain loop that calls `loss.backward()` and `optimizer.step()` instead of `sync.step`.

[Note: Two allocator settings] `gradsync train` keeps freed memory in the process (glibc); others do
not. That alone makes steps on a CPU much faster, and cannot be undone in a process. Each setting
therefore has a set of processes, and each contestant is compared with the `none` of its set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from gradsync.commands.train.config import listed, with_options
from gradsync.core.files import check_name
from gradsync.errors import ConfigError
from gradsync.sync.options import Kind, check_value
from gradsync.sync.registry import STRATEGIES, check_options

ALONE = "none"
OTHERS: dict[str, dict[str, Kind]] = {
    "torch_ddp": {
        "bucket_cap_mb": "size",
        "static_graph": "flag",
        "gradient_as_bucket_view": "flag",
    },
    "accelerate": {},
    "fabric": {},
}
"""Other libraries, with the options they take."""
_PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric"}  # extra `bench`
_SEVERAL = {
    "default": ("naive", "flat", "overlap", "bucketed", "invariant", *OTHERS),
    "all": (*STRATEGIES, *OTHERS),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """One row of the table."""

    label: str  # its name in the table; unique
    name: str  # a strategy of the registry, `none`, or one of `OTHERS`
    options: Mapping[str, Any] = field(default_factory=dict)
    keep_memory: bool = True  # see [Note: Two allocator settings]
    own_loop: bool = False  # for our strategies: whether to use the `loop=user` loop

    @property
    def is_ours(self) -> bool:
        """Whether it is a strategy of the registry."""
        return self.name in STRATEGIES


def parse_contestants(text: str) -> list[Contestant]:
    """The checked contestants of `--strategies`, without `none` (see `with_ideals`). `default` and
    `all` skip contestants whose package is missing."""
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
        if package := _missing(each.name):
            raise ConfigError(
                f"contestant {each.name!r} needs the package {package}: "
                "pip install 'gradsync[bench]'"
            )
    return chosen


def left_out(text: str) -> list[str]:
    """Contestants that `default` or `all` in `text` include, but whose package is missing."""
    several = set(_SEVERAL) & set(listed(text))
    return [name for name in OTHERS if _missing(name)] if several else []


def _missing(name: str) -> str:
    """The package that contestant `name` needs and that is not installed; "" if none is missing."""
    package = _PACKAGES.get(name, "")
    return package if package and find_spec(package) is None else ""


def with_ideals(chosen: Sequence[Contestant], *, same_allocator: bool) -> list[Contestant]:
    """`chosen`, preceded by `none` for each allocator setting in use; with `same_allocator` all
    keep freed memory."""
    if same_allocator:
        chosen = [replace(each, keep_memory=True) for each in chosen]
    settings = {each.keep_memory for each in chosen} or {True}
    labels = {True: ALONE, False: f"{ALONE} (default malloc)"}
    ideals = [
        Contestant(label=label, name=ALONE, keep_memory=keep)
        for keep, label in labels.items()
        if keep in settings
    ]
    return [*ideals, *chosen]


def _contestant(word: str) -> Contestant:
    name, options = with_options(word)
    check_name("contestant", name, (*STRATEGIES, *OTHERS))
    if name not in STRATEGIES:
        for option, value in options.items():
            check_name(f"option of {name}", option, OTHERS[name])
            check_value(option, value, OTHERS[name][option])
        return Contestant(label=word, name=name, options=options, keep_memory=False)
    loop = options.pop("loop", "sync.step")
    if loop not in ("user", "sync.step"):
        raise ConfigError(f"{name}: loop must be user or sync.step, got {loop!r}")
    check_options(STRATEGIES[name], options)
    return Contestant(label=word, name=name, options=options, own_loop=loop == "user")
