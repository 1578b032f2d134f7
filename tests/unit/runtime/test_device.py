"""The device of a rank, and its backend: the same answer on one rank as on many."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gradsync.errors import ConfigError, LaunchError
from gradsync.runtime.device import (
    check_not_shared,
    choose_backend,
    choose_device,
    device_identity,
    device_name,
)
from support.launchers import run_python


@pytest.mark.parametrize(
    ("requested", "local_rank", "visible", "expected"),
    [
        ("auto", 0, 0, "cpu"),
        ("auto", 3, 0, "cpu"),
        ("cpu", 1, 4, "cpu"),
        ("auto", 0, 4, "cuda:0"),
        ("auto", 3, 4, "cuda:3"),
        ("cuda", 2, 4, "cuda:2"),
        ("cuda", 3, 1, "cuda:0"),  # the scheduler shows each task its own GPU only
        ("auto", 5, 4, "cuda:1"),
        ("cuda:2", 0, 4, "cuda:2"),  # exactly that one, whatever the rank
        ("cuda:0", 3, 4, "cuda:0"),
    ],
)
def test_name(requested: str, local_rank: int, visible: int, expected: str) -> None:
    assert device_name(requested, local_rank, visible) == expected


@pytest.mark.parametrize(
    ("requested", "visible", "message"),
    [
        ("cuda", 0, r"'cuda' was asked for, but this process sees no CUDA device .*--device cpu"),
        ("cuda:1", 0, r"'cuda:1' was asked for, but this process sees no CUDA device"),
        ("cuda:4", 4, r"'cuda:4': only 4 CUDA device"),
        ("cuda:-1", 4, r"'cuda:-1': only 4 CUDA device"),
        ("gpu", 4, r"unknown device 'gpu'; use auto, cpu, cuda or cuda:N"),
        ("gpu", 0, r"unknown device 'gpu'"),
        ("", 0, r"unknown device ''"),
    ],
)
def test_what_cannot_be_had_is_refused(requested: str, visible: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        device_name(requested, 0, visible)


def test_a_chosen_cuda_device_becomes_current(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert choose_device("auto", 3) == "cuda:1"
    assert current == ["cuda:1"]
    assert choose_device("cpu", 1) == "cpu"
    assert current == ["cuda:1"]


def test_devices_that_do_not_work_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a driver too old
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 0) == "cpu"


def test_cpu_by_name_needs_no_torch() -> None:
    code = (
        "import sys; from gradsync.runtime.device import choose_device as c, device_identity as i; "
        "print(c('cpu', 1), repr(i('cpu')), 'torch' in sys.modules)"
    )
    assert run_python(["-c", code]).ok().stdout == "cpu '' False\n"


def test_identity_is_the_devices_own_number(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"cuda:0": SimpleNamespace(uuid="a"), "cuda:1": SimpleNamespace(uuid="b")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert (device_identity("cuda:0"), device_identity("cuda:1")) == ("a", "b")


def test_two_ranks_on_one_gpu_are_named() -> None:
    message = r"ranks 1 and 3 share one GPU \(GPU-b\) on host h0; .*--device cpu"
    with pytest.raises(LaunchError, match=message):
        check_not_shared(["h0"] * 4, ["GPU-a", "GPU-b", "GPU-c", "GPU-b"])


@pytest.mark.parametrize(
    ("hosts", "identities"),
    [
        (["h0", "h0"], ["", ""]),  # ranks on CPUs share as they like
        (["h0", "h0"], ["GPU-a", "GPU-b"]),
        (["h0", "h1"], ["GPU-a", "GPU-a"]),  # virtual machines may show equal numbers
        (["h0"], ["GPU-a"]),
    ],
)
def test_ranks_with_a_device_each(hosts: list[str], identities: list[str]) -> None:
    check_not_shared(hosts, identities)


# -- backends -------------------------------------------------------------------------------------


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has NCCL, and `mine` of another package, whatever runs here."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "nccl", "mine"))
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, "mine"])
    carries = dist.Backend.backend_capability | {"mine": ["cpu"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", carries)


@pytest.mark.parametrize(
    ("requested", "device", "chosen"),
    [
        (None, "cpu", "gloo"),
        ("auto", "cuda:1", "cpu:gloo,cuda:nccl"),
        ("gloo", "cpu", "gloo"),
        ("Gloo", "cuda:0", "gloo"),
        ("nccl", "cuda:0", "cuda:nccl,cpu:gloo"),
        ("mine", "cpu", "mine"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu:gloo,cuda:nccl"),
        ("cpu:mine, cuda:nccl", "cuda:0", "cpu:mine,cuda:nccl"),
    ],
)
@pytest.mark.usefixtures("cuda_build")
def test_chosen(requested: str | None, device: str, chosen: str) -> None:
    assert choose_backend(requested, device) == chosen


@pytest.mark.parametrize(
    ("requested", "device", "words"),
    [
        ("foo", "cpu", "backend 'foo' is unknown; here: gloo"),
        ("mpi", "cpu", "backend 'mpi' needs a torch built from source with MPI"),
        ("nccl", "cpu", "backend 'nccl' carries no tensors of cpu"),
        ("cuda:nccl", "cuda:0", "must name one for cpu and one for cuda"),
        ("cpu:gloo", "cuda:0", "must name one for cpu and one for cuda"),
        ("", "cpu", "expected auto, a name such as gloo"),
        ("gloo,nccl", "cpu", "expected auto, a name such as gloo"),
        ("cpu:gloo,cpu:mine", "cpu", "expected auto, a name such as gloo"),
        ("fake", "cpu", "is unknown"),
    ],
)
@pytest.mark.usefixtures("cuda_build")
def test_refused(requested: str, device: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose_backend(requested, device)
    said = str(caught.value)
    assert words in said
    assert "\n" not in said
