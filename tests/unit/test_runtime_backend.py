"""The backends' check: the same answer on one rank as on many, with the list of names."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from gradsync.cli.main import main
from gradsync.errors import ConfigError
from gradsync.runtime.backend import NEEDS, choose_backend
from gradsync.runtime.session import init


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has NCCL, and `shm` registered, whatever runs here."""
    monkeypatch.setattr(dist, "is_backend_available", lambda name: name in ("gloo", "nccl", "shm"))
    known = [
        *dist.Backend.backend_list,
        *(["shm"] if "shm" not in dist.Backend.backend_list else []),
    ]
    monkeypatch.setattr(dist.Backend, "backend_list", known)
    carries = dist.Backend.backend_capability | {"shm": ["cpu"]}
    monkeypatch.setattr(dist.Backend, "backend_capability", carries)


@pytest.mark.parametrize(
    ("requested", "device", "chosen"),
    [
        (None, "cpu", "gloo"),
        ("auto", "cuda:1", "cpu:gloo,cuda:nccl"),
        ("gloo", "cpu", "gloo"),
        ("Gloo", "cuda:0", "gloo"),
        ("nccl", "cuda:0", "cuda:nccl,cpu:gloo"),
        ("shm", "cpu", "shm"),
        ("shm", "cuda:0", "cpu:shm,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "cpu:gloo,cuda:nccl"),
        ("cpu:shm, cuda:nccl", "cuda:0", "cpu:shm,cuda:nccl"),
    ],
)
@pytest.mark.usefixtures("cuda_build")
def test_chosen(requested: str | None, device: str, chosen: str) -> None:
    assert choose_backend(requested, device) == chosen


@pytest.mark.parametrize(
    ("requested", "device", "words"),
    [
        ("foo", "cpu", "backend 'foo' is unknown; here: gloo"),
        ("ncll", "cpu", "is unknown; perhaps you meant 'nccl'"),
        ("mpi", "cpu", "backend 'mpi' needs a torch built from source with MPI"),
        ("nccl", "cpu", "backend 'nccl' carries no tensors of cpu"),
        ("cpu:nccl", "cpu", "backend 'nccl' carries no tensors of cpu"),
        ("gpu:nccl,cpu:gloo", "cpu", "backend 'nccl' carries no tensors of gpu"),
        ("cuda:nccl", "cuda:0", "names none for cpu"),
        ("cpu:gloo", "cuda:0", "names none for cuda"),
        ("", "cpu", "expected auto, a name such as gloo"),
        ("gloo,nccl", "cpu", "expected auto, a name such as gloo"),
        ("cpu:gloo,cpu:shm", "cpu", "expected auto, a name such as gloo"),
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
    assert all(said.count(needs) <= 1 for needs in NEEDS.values())


@pytest.mark.parametrize("name", sorted({"foo", *NEEDS} - {"gloo"}))
def test_what_this_torch_has_not_is_refused_on_one_rank_too(name: str) -> None:
    if name in dist.Backend.backend_list and dist.is_backend_available(name):
        assert init(device="cpu", backend=name).options.backend == name
        return
    session = init(device="cpu", backend=name)
    with (
        pytest.raises(ConfigError, match=f"backend '{name}' .*here: gloo.*(mpi|ucc) needs"),
        session,
    ):
        pass


def test_train_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "tiny", "--backend", "foo", "--dry-run"])
    assert "gloo, nccl, mpi, ucc, xccl, shm" in " ".join(capsys.readouterr().err.split())
