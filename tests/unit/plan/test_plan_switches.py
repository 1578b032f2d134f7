"""Speed switches by what devices can do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradsync.commands.bench import sync as bench_sync
from gradsync.commands.cli.main import main
from gradsync.commands.plan import machine
from gradsync.commands.plan.description import Device, Hardware, Host, Link, speed_switches
from gradsync.commands.plan.machine import fast_dtype
from gradsync.world import World

LINK = Link(name="nvlink4", alpha_s=1e-6, bytes_per_s=1e11)


def gpu(capability: tuple[int, int]) -> Device:
    return Device(
        kind="cuda",
        name="a GPU",
        memory_bytes=10**10,
        peak_flops=1e14,
        compute_capability=capability,
    )


def hardware(*devices: Device, hosts: int = 1) -> Hardware:
    host = Host(devices=devices, link=LINK, cores=8, memory_bytes=10**11)
    return Hardware(hosts=(host,) * hosts, network=LINK if hosts > 1 else None)


def cpu(*instructions: str) -> Hardware:
    device = Device(kind="cpu", name="a CPU", memory_bytes=10**10, peak_flops=1e11)
    host = Host(
        devices=(device,), link=LINK, cores=8, memory_bytes=10**11, instructions=instructions
    )
    return Hardware(hosts=(host,))


@pytest.mark.parametrize(
    ("machine_", "dtype", "tf32", "reason"),
    [
        (hardware(gpu((9, 0))), "bf16", True, "9.0: bf16, TF32, flash attention, fused AdamW"),
        (hardware(gpu((8, 0))), "bf16", True, "8.0: bf16"),
        (hardware(gpu((7, 0))), "fp16", False, "7.0 has no bf16 (8.0 has): fp16, fused AdamW"),
        (hardware(gpu((6, 1))), "fp32", False, "6.1 has no tensor cores (7.0 has): fp32"),
        (
            hardware(gpu((9, 0)), gpu((7, 5))),
            "fp16",
            False,
            "7.5 has no bf16",
        ),  # the oldest decides
        *((cpu("avx2", name), "bf16", False, name) for name in ("amx_bf16", "avx512_bf16", "bf16")),
        (cpu("avx2", "avx512f"), "fp32", False, "the CPU emulates bf16"),
    ],
)
def test_by_what_devices_can_do(machine_: Hardware, dtype: str, tf32: bool, reason: str) -> None:
    found = speed_switches(machine_, {})
    assert (found.dtype, found.tf32) == (dtype, tf32)
    assert reason in found.reason


@pytest.mark.parametrize("instruction", ["avx512f", "avx512_bf16"])
def test_commands_know_a_cpu_that_emulates_bf16(
    instruction: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`train`, `tune` and `bench sync` then take fp32."""
    taken, processor = "fp32", SimpleNamespace(instructions=(instruction,))
    if instruction == "avx512_bf16":
        taken = "bf16"
    monkeypatch.setattr(machine, "read_processor", lambda: processor)
    options = bench_sync.SyncOptions(device="cpu")
    for asked, measured in ((options, taken), (replace(options, dtype="bf16"), "bf16")):
        assert bench_sync.plan_of(asked, World()).settings.dtype == measured
    assert main(["train", "tiny", "--device", "cpu", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"]["dtype"] == taken


@pytest.mark.parametrize("fast", [True, False])
def test_a_gpu_is_asked(fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: fast)
    assert fast_dtype("cuda:1") == ("bf16" if fast else "fp32")
    monkeypatch.setattr(machine, "read_processor", lambda: SimpleNamespace(instructions=()))
    assert {fast_dtype("cpu"), fast_dtype("auto", tmp_path)} == {"fp32"}


ALLOCATOR, LOG = "export PYTORCH_ALLOC_CONF=expandable_segments:True", "export NCCL_DEBUG=WARN"


@pytest.mark.parametrize(
    ("devices", "hosts", "env", "lines"),
    [
        (1, 1, {}, {ALLOCATOR}),
        (2, 1, {"GLOO_SOCKET_IFNAME": "ib0"}, {ALLOCATOR, LOG}),
        (2, 1, {"NCCL_DEBUG": "INFO", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, set()),
        (
            *(1, 2, {"GLOO_SOCKET_IFNAME": "ib0"}),
            {ALLOCATOR, LOG, "export NCCL_SOCKET_IFNAME==ib0"},
        ),
    ],
)
def test_variables_are_suggested_and_the_users_own_left(
    devices: int, hosts: int, env: dict[str, str], lines: set[str]
) -> None:
    machine_ = hardware(*[gpu((9, 0))] * devices, hosts=hosts)
    assert set(speed_switches(machine_, env).suggestions) == lines
