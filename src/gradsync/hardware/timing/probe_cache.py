"""Measured profiles, kept in the user's cache directory: one file per model, leaf and machine.

A cache and nothing else: what cannot be read is measured again, what cannot be written is lost.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from gradsync.errors import ConfigError
from gradsync.hardware.timing.step_profile import StepProfile
from gradsync.hardware.workload import Workload
from gradsync.runtime import environ
from gradsync.runtime.machine import cpu_model, host_cores
from gradsync.runtime.text_file import json_text, read_json, write_text

log = logging.getLogger("gradsync")

_FORMAT = 1
"""Of the measurement: another number makes old files unknown."""


def profile_path(work: Workload, *, device: str, threads: int) -> Path | None:
    """Where the profile of `work` on this machine is kept; None: there is no place for a cache.

    Args:
        work: the number of leaves does not count.
        device: cpu or cuda.
        threads: intra-op threads that compute.
    """
    about = {k: v for k, v in asdict(work).items() if k not in ("num_leaves", "kind")}
    key = json.dumps(
        {
            **about,
            "format": _FORMAT,
            "device": device,
            "accelerator": _accelerator(device),
            "cpu": cpu_model(),
            "cores": host_cores(),
            "threads": threads,
            "torch": version("torch"),
        },
        sort_keys=True,
    )
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        return environ.cache_dir() / "profiles" / f"{digest}.json"
    except ConfigError:
        return None


def load_profile(path: Path | None) -> StepProfile | None:
    """What `save_profile` kept there; None when there is nothing that can be read."""
    if path is None:
        return None
    try:
        return StepProfile.from_json(read_json(path))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_profile(path: Path | None, profile: StepProfile) -> None:
    """Keep it, if that is possible."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json_text(profile.to_json()))
    except OSError as error:
        log.info("the measured profile is not kept: %s: %s", path, error.strerror)


def _accelerator(device: str) -> str | None:
    if device != "cuda":
        return None
    import torch

    return torch.cuda.get_device_name()
