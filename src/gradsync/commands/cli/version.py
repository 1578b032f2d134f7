"""`gradsync --version`: gradsync, torch and its build, devices and launchers, without importing
torch."""

from __future__ import annotations

import platform
import re
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from gradsync import __version__
from gradsync.commands.plan.machine import detect_hardware
from gradsync.errors import GradsyncError
from gradsync.runtime import environ

LAUNCHERS = ("torchrun", "mpirun", "srun", "flux")
_BUILDS = {"CUDA": "cuda", "ROCm": "hip", "XPU": "xpu"}


def describe() -> str:
    """A few lines; the first is the version alone."""
    found = [name for name in LAUNCHERS if shutil.which(name)]
    lines = [f"gradsync {__version__}", f"python {platform.python_version()}", _torch_line()]
    lines += [f"devices: {_devices()}", f"launchers: {', '.join(found) or 'none on PATH'}"]
    return "\n".join(lines)


def _torch_line() -> str:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch: not installed"
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text("utf-8")
    except OSError as error:
        return f"torch: {error.filename}: {error.strerror}"
    said = dict(re.findall(r"^(\w+)\b.*= '(.+)'$", text, re.MULTILINE))
    built = [f"{name} {said[key]}" for name, key in _BUILDS.items() if key in said] or ["CPU"]
    return f"torch {said.get('__version__', '?')}, built for {built[0]}"


def _devices() -> str:
    try:
        hardware = detect_hardware(environ.snapshot())
    except GradsyncError as error:  # invalid launcher variables
        return str(error).partition("\n")[0]
    host = hardware.hosts[0]
    names = Counter(device.name for device in host.devices if device.kind != "cpu")
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items())
    return f"{gpus or 'no GPU'}; {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB"
