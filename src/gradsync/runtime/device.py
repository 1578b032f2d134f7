"""Choose the device a rank computes on, and the torch backend that carries its messages."""

from __future__ import annotations

from gradsync.errors import ConfigError, LaunchError

AUTO = "auto"
NEEDS = {
    "gloo": "in every torch",
    "nccl": "CUDA or ROCm devices, and a torch built for them",
    "mpi": "a torch built from source with MPI",
    "ucc": "a torch built with UCC",
    "xccl": "Intel GPUs, and a torch built for them",
}
"""Names of the backends, with their requirements."""


def device_name(requested: str, local_rank: int, visible: int) -> str:
    """The torch device string of a rank; pure.

    The index is `local_rank % visible`, never the global rank (wrong on the second node), and
    modulo because a scheduler that gives each task one GPU leaves every rank one visible device.

    Args:
        requested: "auto", "cpu", "cuda", or "cuda:2" for exactly that one.
        local_rank: index of the rank on its host.
        visible: number of CUDA devices this process can see.

    Raises:
        LaunchError: CUDA is requested but absent, or the index does not exist.
    """
    kind, _, index = requested.partition(":")
    if requested == "cpu" or (requested == AUTO and visible == 0):
        return "cpu"
    if kind != "cuda" and requested != AUTO:
        raise LaunchError(f"unknown device {requested[:80]!r}; use auto, cpu, cuda or cuda:N")
    if visible == 0:
        raise LaunchError(
            f"device {requested[:80]!r} was asked for, but this process sees no CUDA device "
            "(check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch is a CUDA build), "
            "or use --device cpu"
        )
    if index:
        if index not in map(str, range(visible)):
            raise LaunchError(
                f"device {requested[:80]!r}: only {visible} CUDA device(s) are visible"
            )
        return f"cuda:{index}"
    return f"cuda:{local_rank % visible}"


def device_here(requested: str, local_rank: int) -> str:
    """`device_name` for this machine."""
    if requested == "cpu":
        return "cpu"
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return device_name(requested, local_rank, visible)


def choose_device(requested: str, local_rank: int) -> str:
    """As `device_here`; makes the chosen CUDA device current."""
    name = device_here(requested, local_rank)
    if name.startswith("cuda"):
        import torch

        torch.cuda.set_device(name)
    return name


def device_identity(device: str, host_id: str = "") -> str:
    """A name for the physical device, equal on two ranks only if they share it; "" for CPU.

    `host_id` is NCCL_HOSTID: ranks with different ones may share a GPU on purpose.
    """
    if not device.startswith("cuda"):
        return ""
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return f"{uuid} of {host_id}" if host_id else uuid


def check_not_shared(hosts: list[str], identities: list[str]) -> None:
    """Refuse two ranks on one GPU: NCCL would fail later, with a message that names neither rank.

    Args:
        hosts, identities: host name and `device_identity` of each rank, in rank order.
    """
    seen: dict[tuple[str, str], int] = {}
    for rank, key in enumerate(zip(hosts, identities, strict=True)):
        if key[1] and key in seen:
            raise LaunchError(
                f"ranks {seen[key]} and {rank} share one GPU ({key[1]}) on host {key[0]}; "
                "start at most one rank per visible GPU, or use --device cpu"
            )
        seen[key] = rank


def check_names(requested: str) -> dict[str, str]:
    """Backend by device, from `cpu:gloo,cuda:nccl`; `gloo` stands for all devices, under "".

    Needs no torch, so it knows no backends from other packages.
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
    """The backend of the default process group; the same checks on one rank and on many.

    Args:
        requested: a name, names by device, or None or "auto": gloo, on CUDA gloo and nccl. A
            backend without CPU tensors is combined with gloo, for the small messages.
        device: this rank's torch device.
    """
    kind = device.partition(":")[0]
    if requested in (None, AUTO):
        return "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    from torch.distributed import Backend, is_backend_available

    names = check_names(requested)
    here = [n for n in Backend.backend_list if n not in ("undefined", "fake")]
    here = [name for name in here if is_backend_available(name)]
    for name in names.values():
        if name not in here:
            needs = f"needs {NEEDS[name]}" if name in NEEDS else "is unknown"
            raise ConfigError(f"backend {name[:40]!r} {needs}; here: {', '.join(here)}")
    whole = names.get("")
    if whole is None:
        if not names.keys() >= {"cpu", kind}:
            raise ConfigError(f"backend {requested!r} must name one for cpu and one for {kind}")
        return ",".join(f"{device}:{name}" for device, name in names.items())
    carries = Backend.backend_capability.get(whole, ["cpu", "cuda"])
    if kind not in carries:
        raise ConfigError(f"backend {whole!r} carries no tensors of {kind}")
    return whole if "cpu" in carries else f"{kind}:{whole},cpu:gloo"
