"""Hardware for people to read, in `gradsync doctor`; pure."""

from __future__ import annotations

from itertools import groupby

from gradsync.hardware.description import Device, Hardware, Link


def hardware_rows(hardware: Hardware) -> list[tuple[str, str]]:
    """What each line is about, and the line; equal devices and equal hosts in one."""
    rows: list[tuple[str, str]] = []
    for host, same_hosts in groupby(hardware.hosts):
        count = len(list(same_hosts))
        if count > 1:
            rows.append(("hosts", f"{count} of these"))
        for device, same in groupby(host.devices):
            rows.append(("devices", f"{len(list(same))} x {_device(device)}"))
        rows.append(("link", _link(host.link)))
        rows.append(("host memory", f"{host.memory_bytes / 1e9:.1f} GB"))
        if host.instructions:
            rows.append(("instructions", " ".join(host.instructions)))
        if host.interfaces:
            rows.append(("interfaces", " ".join(host.interfaces)))
    if hardware.network is not None:
        rows.append(("network", _link(hardware.network)))
    return rows + [("note", note) for note in hardware.notes]


def _device(device: Device) -> str:
    words = [f"{device.memory_bytes / 1e9:.1f} GB"]
    if device.free_bytes is not None:
        words.append(f"{device.free_bytes / 1e9:.1f} GB free")
    words.append(f"{device.peak_flops / 1e12:.3g} TFLOP/s")
    if device.compute_capability is not None:
        words.append("compute capability {}.{}".format(*device.compute_capability))
    if device.shared:
        words.append("in use by others")
    return f"{device.name}: {', '.join(words)}{_said(device.source)}"


def _link(link: Link) -> str:
    figures = f"{link.bytes_per_s / 1e9:.3g} GB/s, {link.alpha_s * 1e6:.3g} µs"
    return f"{link.name}: {figures}{_said(link.source)}"


def _said(source: str) -> str:
    return f"; {source}" if source else ""
