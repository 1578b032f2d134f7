"""Fitted costs, kept in the user's cache directory for planning: one file per kind of machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsync.errors import DataError, RunError
from gradsync.hardware.timing.alpha_beta import Fit
from gradsync.runtime import environ
from gradsync.runtime.text_file import json_text, read_json, write_text

_KEY = (
    *("cpu", "cores", "accelerator", "backend", "world_size", "threads_per_rank", "torch"),
    *("num_nodes", "dtype"),
)
"""What a cost depends on; of the environment and the benchmark's settings."""


def fits_path(environment: Mapping[str, Any]) -> Path:
    """Where the fits of this machine are kept.

    Args:
        environment: of `environment.environment`, and `num_nodes` and `dtype`.
    """
    key = json.dumps({name: environment[name] for name in _KEY})
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return environ.cache_dir() / "alpha-beta" / f"{digest}.json"


def save_fits(environment: Mapping[str, Any], fits: Sequence[Fit]) -> Path:
    """Keep `fits`; those of operations and algorithms that were not measured now stay as they are.

    Raises:
        RunError: the cache cannot be read or written.
        DataError: what is there already is damaged.
    """
    path = fits_path(environment)
    known = {(fit.operation, fit.algorithm): fit for fit in load_fits(environment)}
    known |= {(fit.operation, fit.algorithm): fit for fit in fits}
    document = {
        "environment": {name: environment[name] for name in ("date", *_KEY)},
        "fits": [fit.to_json() for fit in known.values()],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(document))
    except OSError as error:
        raise _inaccessible("write", path, error) from error
    return path


def load_fits(environment: Mapping[str, Any]) -> list[Fit]:
    """What `save_fits` kept for such an environment; nothing when it never ran.

    Raises:
        RunError: the cache cannot be read.
        DataError: the file is damaged.
    """
    path = fits_path(environment)
    try:
        return [Fit(**fit) for fit in read_json(path)["fits"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _inaccessible("read", path, error) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete it and measure again") from error


def _inaccessible(what: str, path: Path, error: OSError) -> RunError:
    return RunError(
        f"could not {what} {path}: {error.strerror}; GRADSYNC_CACHE can name another cache"
    )
