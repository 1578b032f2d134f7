"""What was measured on this machine: a cache of answers, and lines through times; no torch.

The cache has one file for each answer and everything that it depends on. It is only a cache: an
unreadable file is measured again, one that cannot be written is lost.

A measured line is `seconds = alpha + beta * bytes`. Times span five decades, so errors are
relative, and half the time is as wrong as twice the time. With p the predicted and t the measured
time, an error is e = (p - t) / sqrt(p t); for small ones that is p / t - 1. The line minimises
weighted squares; each iteration derives the weights from the last line's errors until they
converge: Huber's (1964, "Robust estimation of a location parameter"). A few sizes that fit no line
(the end of a cache, other load) therefore bend it little.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from gradsync.core.files import json_text, one_line, parse_json, read_bytes, write_result
from gradsync.errors import ConfigError
from gradsync.runtime import environ
from gradsync.runtime.machine import host_cores

T = TypeVar("T")

log = logging.getLogger("gradsync")

_FORMAT_VERSION = 1
_ITERATIONS = 200
_SMALL_ERROR = 0.1  # Errors count squared up to here, linearly beyond

Conditions = dict[str, Any]
"""The facts that a measurement depends on, for JSON; an answer holds if all are equal."""


def cpu_model() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version_of(package: str) -> str:
    """Its version, without importing it; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def machine_conditions(device: str, threads: int) -> Conditions:
    """Conditions of any measurement here: the machine, and a rank's intra-op threads."""
    accelerator = "cpu"
    if device.startswith("cuda"):
        import torch

        accelerator = torch.cuda.get_device_name(device)
    about = {"device": accelerator, "cpu": cpu_model(), "cores": host_cores()}
    return about | {"threads": threads, "torch": version_of("torch")}


@dataclass(frozen=True, slots=True)
class Cache(Generic[T]):
    """Answers measured here, one file for each `Conditions`."""

    kind: str  # Name of its folder in the user's cache
    build: Callable[[Any], T]  # From a file's JSON object; ValueError or similar if invalid

    def path(self, conditions: Conditions) -> Path:
        """File of the answer for `conditions`; ConfigError if there is no folder for caches."""
        key = json.dumps(conditions, sort_keys=True).encode()
        return environ.cache_dir() / self.kind / f"{hashlib.sha256(key).hexdigest()[:16]}.json"

    def save(self, conditions: Conditions, found: T) -> Path:
        """Store a dataclass, replacing an older one; returns the path. RunError if that fails."""
        answer: Any = found
        heading = {"format_version": _FORMAT_VERSION, "conditions": conditions}
        text, path = json_text(heading | asdict(answer)), self.path(conditions)
        write_result(path, text, "; GRADSYNC_CACHE can name another cache")
        return path

    def read(self, conditions: Conditions) -> T | None:
        """The answer for `conditions`; None without one. An entry that `build` refuses is missing:
        a warning names it, and the next measurement replaces it. ConfigError as `path`."""
        path = self.path(conditions)
        try:
            document = parse_json(read_bytes(path))
            if (found := document["format_version"]) != _FORMAT_VERSION:
                raise ValueError(f"format_version {found}, not {_FORMAT_VERSION}")
            if document["conditions"] != conditions:
                raise ValueError("it was measured for something else")
            return self.build(document)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            said = one_line(f"{type(error).__name__}: {error}")
            log.warning("%s cannot be used (%s): it is replaced when measured again", path, said)
            return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The line through one algorithm's times."""

    operation: str  # Such as all_reduce
    algorithm: str  # Such as ring
    alpha_s: float  # Seconds; at least 0
    beta_s_per_byte: float  # Of the whole tensor; at least 0
    residual: float  # Median of |predicted / measured - 1|


def fit_line(operation: str, algorithm: str, points: Mapping[int, float]) -> Fit:
    """The line through `points`: seconds above 0 by bytes, at two sizes or more."""
    times = np.array(list(points.values()))
    # Rows are divided by the time, so that the right side is 1.
    rows = np.array([(1, size) for size in points]) / times[:, None]
    line, ratios = np.zeros(2), np.ones(len(rows))  # predicted / measured
    for _ in range(_ITERATIONS):
        # Weights that make (ratio - 1)**2 count as e**2, and a large one as |e|.
        errors = abs(ratios - 1) / ratios**0.5
        weights = _SMALL_ERROR / np.maximum(errors, _SMALL_ERROR) / ratios
        products, right = (rows.T * weights) @ rows, rows.T @ weights
        line = np.linalg.solve(products, right)
        if line.min() < 0:  # the best allowed line lies on that border
            line = np.where(line < 0, 0.0, right / products.diagonal())
        # The mean of old and new: without it the iteration can oscillate between two lines.
        ratios = (ratios + rows @ line) / 2
    return Fit(
        operation=operation,
        algorithm=algorithm,
        alpha_s=float(line[0]),
        beta_s_per_byte=float(line[1]),
        residual=float(np.median(abs(rows @ line - 1))),
    )


@dataclass(frozen=True, slots=True)
class Fits:
    """All lines of one machine."""

    fits: tuple[Fit, ...] = ()


FITS = Cache("alpha-beta", lambda document: msgspec.convert(document, Fits))


def fit_conditions(
    device: str, world_size: int, threads: int, *, num_nodes: int = 1, dtype: str = "fp32"
) -> Conditions:
    """Conditions of the lines of `world_size` ranks."""
    ranks = {"world_size": world_size, "num_nodes": num_nodes, "dtype": dtype}
    return machine_conditions(device, threads) | ranks


def save_fits(conditions: Conditions, fits: Sequence[Fit]) -> Path:
    """Save `fits`; keep the stored lines of other operations and algorithms. RunError if the cache
    cannot be written."""
    known = {(fit.operation, fit.algorithm): fit for fit in [*load_fits(conditions), *fits]}
    return FITS.save(conditions, Fits(tuple(known.values())))


def load_fits(conditions: Conditions) -> tuple[Fit, ...]:
    """The lines that `save_fits` stored; empty if there are none."""
    with suppress(ConfigError):  # no folder for caches
        if (found := FITS.read(conditions)) is not None:
            return found.fits
    return ()
