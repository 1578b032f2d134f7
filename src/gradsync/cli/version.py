"""`gradsync --version`: gradsync, torch and its build, devices and launchers, without importing
torch."""

from __future__ import annotations

import mmap
import platform
import re
import shutil
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from gradsync import __version__
from gradsync.errors import GradsyncError
from gradsync.plan.machine import detect_hardware
from gradsync.runtime import environ

LAUNCHERS = ("torchrun", "mpirun", "srun", "flux")
_BACKENDS = ("Gloo", "NCCL", "MPI", "UCC", "XCCL")


def describe() -> str:
    """A few lines, the first of which is the version alone."""
    found = [name for name in LAUNCHERS if shutil.which(name)]
    return "\n".join(
        [
            f"gradsync {__version__}",
            f"python {platform.python_version()}",
            _torch_line(),
            f"devices: {_devices()}",
            f"launchers: {', '.join(found) or 'none on PATH'}",
        ]
    )


def _torch_line() -> str:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch: not installed"
    folder = Path(spec.origin).parent
    try:
        text = (folder / "version.py").read_text("utf-8")
    except OSError as error:
        return f"torch: {error.strerror}: {folder / 'version.py'}"
    said = dict(re.findall(r"^(\w+)\b.*= '(.+)'$", text, re.MULTILINE))
    build = next(
        (f"{n} {said[k]}" for n, k in (("CUDA", "cuda"), ("ROCm", "hip")) if k in said), ""
    )
    backends = ", ".join(compiled_backends(folder)) or "unknown (gradsync doctor asks torch)"
    return f"torch {said.get('__version__', '?')}, built for {build or 'CPU'}; backends: {backends}"


def compiled_backends(torch_folder: Path) -> list[str]:
    """Backends of torch.distributed that torch was compiled with: their C++ classes have a type in
    the library of its bindings. Importing torch to ask it takes seconds, this 30 milliseconds."""
    try:
        with (
            open(torch_folder / "lib" / "libtorch_python.so", "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library,
        ):
            names = {name.lower(): f"ProcessGroup{name}" for name in _BACKENDS}
            return [
                n
                for n, c in names.items()
                if library.find(b"N4c10d%d%bE" % (len(c), c.encode())) >= 0
            ]
    except (OSError, ValueError):  # not there, or empty
        return []


def _devices() -> str:
    try:
        hardware = detect_hardware(environ.snapshot())
    except GradsyncError as error:  # variables of a launcher that make no sense
        return str(error).partition("\n")[0]
    host = hardware.hosts[0]
    names = Counter(device.name for device in host.devices if device.kind != "cpu")
    gpus = ", ".join(f"{count} x {name}" for name, count in names.items())
    return f"{gpus or 'no GPU'}; {host.cores} cores, {host.memory_bytes / 2**30:.1f} GiB"
