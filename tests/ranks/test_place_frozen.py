"""Frozen submodules on other devices, around a trainable rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError
from gradsync.faces.frozen import frozen_parts, place_frozen
from gradsync.hardware.placement import Part, Place, Placement, place_parts
from gradsync.sync.replicate import replicate
from support.thread_ranks import run_thread_ranks


class Frozen(nn.Module):
    """As language models are: something in front, blocks in a list, something behind."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.outlet = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor, *, factor: Tensor | None = None) -> dict[str, Tensor]:
        x = self.inlet(x) * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"out": self.outlet(x) if factor is None else self.outlet(x) * factor}


class Model(nn.Module):
    """Two trainable ends and two frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4)
        self.large = Frozen().requires_grad_(False)
        self.small = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.head(self.large(x, factor=x)["out"] + self.small(x))


def two_and_one() -> Placement:
    places = {"large": Place(devices=(0, 1), first_blocks=2), "small": Place(devices=(2,))}
    return Placement(places=places, left=(0, 0, 0))


def seeded() -> Model:
    torch.manual_seed(3)
    return Model()


def test_frozen_parts_are_found_with_their_blocks() -> None:
    parts = {part.name: part for part in frozen_parts(seeded())}
    assert set(parts) == {"large", "small"}
    linear = 4 * (16 + 4)
    assert parts["small"] == Part(name="small", num_bytes=linear)
    assert parts["large"].blocks == (linear,) * 4
    assert parts["large"].num_bytes == 6 * linear + 16
    assert [part.name for part in frozen_parts(seeded(), least_bytes=100)] == ["large"]


def test_they_can_be_placed_as_found() -> None:
    placement = place_parts(frozen_parts(seeded()), [340, 340, 90])
    assert placement.places["large"] == Place(devices=(0, 1), first_blocks=1)
    assert placement.places["small"] == Place(devices=(0,))


def test_tensors_go_where_they_belong() -> None:
    """The meta device stands for another one."""
    model = seeded()
    handle = place_frozen(model, two_and_one(), ["cpu", "meta", "meta"])
    homes = {name: p.device.type for name, p in model.named_parameters()}
    assert {name for name, home in homes.items() if home == "meta"} == {
        *(f"large.layers.{i}.{what}" for i in (2, 3) for what in ("weight", "bias")),
        *("small.weight", "small.bias"),
    }
    assert handle.hooks
    handle.remove()
    assert not handle.hooks


def test_inputs_follow_and_outputs_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move, as the tensors' `to` sees it, with devices that only have names."""
    model = seeded()
    expected = model(torch.ones(2, 4))
    moves: list[str] = []
    original = Tensor.to

    def noted(self: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if arguments and isinstance(arguments[0], str | torch.device):
            moves.append(str(arguments[0]))
        return original(self, "cpu")

    place_frozen(model, two_and_one(), ["cpu:0", "cpu:1", "cpu:2"])
    monkeypatch.setattr(Tensor, "to", noted)
    result = model(torch.ones(2, 4))
    monkeypatch.undo()
    assert torch.equal(result, expected)
    # large (input, factor), inlet, layers 0 to 3, outlet, and back; then small, and back
    assert moves == [
        *("cpu:0",) * 2,
        "cpu:0",
        *("cpu:0", "cpu:0", "cpu:1", "cpu:1"),
        "cpu:0",
        "cpu",
        "cpu:2",
        "cpu",
    ]


def test_replicas_train_around_frozen_parts() -> None:
    """The same gradients as without placement, on two ranks, and frozen parts get none."""

    def gradients(model: Model, x: Tensor) -> list[Tensor]:
        model.zero_grad()
        model(x).sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    models = [seeded() for _ in range(2)]
    inputs = [torch.full((2, 4), float(rank + 1)) for rank in range(2)]
    expected = gradients(seeded(), torch.cat(inputs) / 1.0)

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        model = models[rank]
        place_frozen(model, two_and_one(), ["cpu"] * 3)
        sync = replicate(model, comm=ProcessGroupCommunicator(group))
        sync.backward(model(inputs[rank]).sum(), weight=1)
        seen: list[Tensor] = []
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0)
        optimizer.register_step_pre_hook(
            lambda *_: seen.extend(p.grad.clone() for p in model.parameters() if p.requires_grad)
        )
        sync.step(optimizer)
        assert all(p.grad is None for p in model.large.parameters())
        sync.close()
        return seen

    for found in run_thread_ranks(work, 2):
        for mine, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(mine * 2, whole)


def test_what_cannot_be_placed_is_named() -> None:
    def place(name: str, device: int = 0) -> None:
        placement = Placement(places={name: Place(devices=(device,))}, left=(0,))
        place_frozen(seeded(), placement, ["cpu"])

    with pytest.raises(ConfigError, match="no submodule 'medium'"):
        place("medium")
    with pytest.raises(ConfigError, match="'head' trains"):
        place("head")
    with pytest.raises(ConfigError, match="small is placed on device 1, 1 were given"):
        place("small", 1)
