"""Components that a test needs: a missing one skips, unless it was declared required.

`GRADSYNC_TEST_REQUIRE=mpirun,slurm` (or `all`) makes a missing one fail, so that CI cannot go green
by skipping. `all` means all that a package manager can install; a CUDA device and the right to make
network namespaces are asked for by name.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable

import pytest

from support import namespaces, slurm_cluster


def _program(*names: str) -> list[str]:
    path = slurm_cluster.program_path()
    return [name for name in names if not shutil.which(name, path=path)]


def _module(*names: str) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


def _cuda() -> list[str]:
    import torch

    return [] if torch.cuda.is_available() else ["a CUDA device"]


MISSING: dict[str, Callable[[], list[str]]] = {
    "python": list,
    "torchrun": lambda: _module("torch"),
    "mpirun": lambda: _program("mpirun"),
    "mpich": lambda: _program("mpiexec.mpich"),
    "slurm": slurm_cluster.missing_programs,
    "iproute2": lambda: _program("ip", "tc"),
    "nftables": lambda: _program("nft"),
    "namespaces": namespaces.missing,
    "chromium": lambda: _program("chromium"),
    "import-linter": lambda: _module("importlinter"),
    "hatchling": lambda: _module("hatchling"),
    "trackers": lambda: _module("tensorboard", "wandb"),
    "cuda": _cuda,
}
"""Component -> what of it is not there."""
ALIASES = {"srun": "slurm"}
BY_NAME = ("cuda", "namespaces")
"""Components that `all` does not cover."""


def is_required(name: str) -> bool:
    """True when the run declared that it has `name`."""
    declared = os.environ.get("GRADSYNC_TEST_REQUIRE", "").split(",")
    return name in declared or ("all" in declared and name not in BY_NAME)


def require(name: str) -> None:
    """Skip the test when component `name` is missing; fail it when the run declared it required."""
    name = ALIASES.get(name, name)
    missing = MISSING[name]()
    if not missing:
        return
    message = f"{name} needs {', '.join(missing)}, not found here"
    if is_required(name):
        pytest.fail(f"{message}, and GRADSYNC_TEST_REQUIRE lists it", pytrace=False)
    pytest.skip(message)
