"""Which of torch.distributed's backends carries the messages: checked before ranks meet."""

from __future__ import annotations

from difflib import get_close_matches

from gradsync.errors import ConfigError

AUTO = "auto"
NEEDS = {
    "gloo": "in every torch",
    "nccl": "CUDA or ROCm devices, and a torch built for them",
    "mpi": "a torch built from source with MPI",
    "ucc": "a torch built with UCC",
    "xccl": "Intel GPUs, and a torch built for them",
    "shm": "`import gradsync.backends`; ranks on one host",
}
"""The names, and what each needs."""


def check_names(requested: str) -> dict[str, str]:
    """The name for each device, from `cpu:gloo,cuda:nccl`; from `gloo`, the one for all, under "".

    Needs no torch, so it knows no backend that another package brings.

    Raises:
        ConfigError: of another form.
    """
    names: dict[str, str] = {}
    for part in requested.lower().split(","):
        device, colon, name = part.strip().rpartition(":")
        if not name or device in names or not bool(device) == bool(colon) == (":" in requested):
            raise ConfigError(
                f"backend {requested[:80]!r}: expected {AUTO}, a name such as gloo, or one for "
                "each device such as cpu:gloo,cuda:nccl"
            )
        names[device] = name
    return names


def choose_backend(requested: str | None, device: str) -> str:
    """The backend of the default process group; checked alike on one rank and on many.

    Args:
        requested: a name, names by device, or None or "auto": gloo, and nccl beside it on CUDA.
            Beside one that carries no CPU tensors comes gloo, for the small messages.
        device: this rank's torch device.

    Raises:
        ConfigError: unknown, not in this build of torch, or none for `device`; lists them all.
    """
    kind = device.partition(":")[0]
    if requested in (None, AUTO):
        return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    from torch.distributed import Backend, is_backend_available

    names = check_names(requested)
    carries = {
        name: Backend.backend_capability.get(name, ["cpu", "cuda"])
        for name in Backend.backend_list
        if name not in ("undefined", "fake") and is_backend_available(name)
    }
    whole = names.get("")
    if whole in carries and kind in carries[whole]:
        names = {each: whole for each in ("cpu", "cuda") if each in carries[whole]}
        names.setdefault("cpu", "gloo")
    elif whole == "shm" and whole in carries:
        names = {"cpu": whole, "cuda": "nccl"}
    for each, name in names.items():
        if name not in carries:
            needs = f"needs {NEEDS[name]}" if name in NEEDS else f"is unknown{_near(name)}"
            raise ConfigError(f"backend {name[:40]!r} {needs}; {_listed(carries, name)}")
        if each not in carries[name]:
            raise ConfigError(
                f"backend {name!r} carries no tensors of {each or kind}; {_listed(carries)}"
            )
    for needed in ("cpu", kind):
        if needed not in names:
            raise ConfigError(f"backend {requested!r} names none for {needed}; {_listed(carries)}")
    return whole if whole and len(set(names.values())) == 1 else _joined(names)


def _joined(names: dict[str, str]) -> str:
    return ",".join(f"{device}:{name}" for device, name in names.items())


def _near(name: str) -> str:
    near = get_close_matches(name, NEEDS, n=1)
    return f"; perhaps you meant {near[0]!r}" if near else ""


def _listed(carries: dict[str, list[str]], said: str = "") -> str:
    """All names: usable ones, and what each of the others needs but the one `said`."""
    rest = [f"{key} needs {needs}" for key, needs in NEEDS.items() if key not in (*carries, said)]
    return f"here: {', '.join(carries)}" + "".join(f"; {each}" for each in rest)
