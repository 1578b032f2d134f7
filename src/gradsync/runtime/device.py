"""Which device a rank computes on."""

from __future__ import annotations

import re

from gradsync.errors import LaunchError


def device_name(requested: str, local_rank: int, visible: int) -> str:
    """The torch device string of a rank; pure.

    The index is `local_rank % visible`, never the global rank (wrong on the second node), and
    modulo because a scheduler that gives each task one GPU leaves every rank one visible device.

    Args:
        requested: "auto", "cpu", "cuda", or "cuda:2" for exactly that one.
        local_rank: index of the rank on its host.
        visible: number of CUDA devices this process can see.

    Raises:
        LaunchError: CUDA asked for where there is none, or an index that does not exist.
    """
    kind, _, index = requested.partition(":")
    if kind == "cpu" and index:
        raise LaunchError(f"device {requested[:80]!r}: a CPU has no index; use cpu")
    if kind == "cpu" or (kind == "auto" and visible == 0):
        return "cpu"
    if kind not in ("auto", "cuda"):
        raise LaunchError(f"unknown device {requested[:80]!r}; use auto, cpu, cuda or cuda:N")
    if visible == 0:
        raise LaunchError(
            f"device {requested[:80]!r} was asked for, but this process sees no CUDA device "
            "(check nvidia-smi, CUDA_VISIBLE_DEVICES and that torch is a CUDA build), "
            "or use --device cpu"
        )
    if index:
        if re.fullmatch("[0-9]{1,9}", index) is None or int(index) >= visible:
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


def device_identity(device: str) -> str:
    """A name for the physical device, equal on two ranks only when they share it; "" for CPU."""
    if not device.startswith("cuda"):
        return ""
    import torch

    return str(torch.cuda.get_device_properties(device).uuid)


def check_not_shared(hosts: list[str], identities: list[str]) -> None:
    """Refuse two ranks on one GPU: NCCL would fail later with a message that names neither.

    Args:
        hosts, identities: host name and `device_identity` of each rank, in rank order.

    Raises:
        LaunchError: naming both ranks.
    """
    seen: dict[tuple[str, str], int] = {}
    for rank, key in enumerate(zip(hosts, identities, strict=True)):
        if key[1] and key in seen:
            raise LaunchError(
                f"ranks {seen[key]} and {rank} share one GPU ({key[1]}) on host {key[0]}; "
                "start at most one rank per visible GPU, or use --device cpu"
            )
        seen[key] = rank
