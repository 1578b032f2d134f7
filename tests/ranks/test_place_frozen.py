"""Frozen submodules on other devices, around a trainable rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.compat.elastic_gpu import ElasticGPUConfig
from gradsync.compat.frozen import frozen_parts, place_frozen
from gradsync.data.loader import loader
from gradsync.errors import ConfigError
from gradsync.plan.description import Device, Hardware, Host, Link
from gradsync.plan.placement import Part, Place, Placement, place_parts
from gradsync.sync.replicate import replicate
from gradsync.world import World
from support.cpu_devices import CpuDevices
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


class Pair(nn.Module):
    """Two frozen language models between small parts that train, as in the published table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.encoder = nn.Linear(4, 4)
        self.llama = Frozen().requires_grad_(False)
        self.qwen = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return self.head(self.llama(x)["out"] * self.qwen(x))


@pytest.fixture
def new_parameters() -> Iterator[None]:
    """Modules get new parameters where they move, as to devices of another type."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def trained(model: Pair, comm: Communicator) -> dict[str, Tensor]:
    """Its weights after two steps of four samples."""
    sync = replicate(nn.ModuleList([model.encoder, model.head]), comm=comm)  # what trains
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = TensorDataset(torch.arange(32.0).sin().view(8, 4), torch.arange(8.0).cos().view(8, 1))
    world = World(
        rank=comm.rank,
        world_size=comm.world_size,
        local_rank=comm.rank,
        local_world_size=comm.world_size,
    )
    batches = loader(data, world, global_batch_size=4, micro_batch_size=1, seed_leaves=False)
    for step in islice(batches, 2):
        for leaf in step:
            loss = (model(leaf.inputs) - leaf.targets).square().sum()
            sync.backward(loss, leaf=leaf)
        sync.step(optimizer)
    sync.close()
    batches.close()
    return {name: tensor.to("cpu").detach() for name, tensor in model.state_dict().items()}


def planned(count: int, room: int) -> ElasticGPUConfig:
    """For `count` devices with `room` bytes each, of which what trains takes 200."""
    parts = frozen_parts(Pair())
    size_gb = (200 + sum(part.num_bytes for part in parts)) / 1e9
    device = Device(kind="cpu", name="CPU", memory_bytes=room, peak_flops=1e9)
    link = Link(name="shared memory", alpha_s=1e-6, bytes_per_s=1e9)
    host = Host(devices=(device,) * count, link=link, cores=1, memory_bytes=10**6)
    return ElasticGPUConfig(4, size_gb, 1.0, frozen=parts, hardware=Hardware(hosts=(host,)))


@pytest.mark.usefixtures("new_parameters")
@pytest.mark.parametrize(
    ("count", "room", "strategy", "homes"),
    [
        (2, 700, "model_split", {"llama.layers.0": 0, "llama.layers.1": 0, "qwen.0": 1}),
        (3, 500, "hybrid", {"llama.layers.0": 0, "llama.layers.1": 1, "qwen.0": 2}),
        (4, 700, "hybrid_ddp", {"llama.layers.0": 0, "llama.layers.1": 0, "qwen.0": 1}),
    ],
)
def test_a_split_trains_as_one_device_does(
    count: int, room: int, strategy: str, homes: dict[str, int]
) -> None:
    """Bit for bit, one replica or two; each rank's own device is cpu:0."""
    expected = trained(Pair(), SingleCommunicator())
    assert not torch.equal(expected["head.weight"], Pair().head.weight)
    config = planned(count, room)
    assert config.strategy == strategy
    models = [Pair() for _ in config.groups]

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        model = models[rank]
        with CpuDevices():
            config.place(model, [f"cpu:{index}" for index in range(len(config.groups[rank]))])
            parts = {name: model.get_parameter(f"{name}.weight") for name in homes}
            assert {name: part.device.index or 0 for name, part in parts.items()} == homes
            assert model.head.weight.device == torch.device("cpu")
            return trained(model, ProcessGroupCommunicator(group))

    for found in run_thread_ranks(work, len(models)):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.usefixtures("new_parameters")
def test_two_replicas_beside_a_second_model_on_the_third_device() -> None:
    """2 + 1: each rank keeps one frozen model beside what trains, the other one is elsewhere."""
    expected = trained(Pair(), SingleCommunicator())
    places = {"llama": Place(devices=(0,)), "qwen": Place(devices=(1,))}
    models = [Pair() for _ in range(2)]

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        with CpuDevices():
            placement = Placement(places=places, left=())
            place_frozen(models[rank], placement, ["cpu:0", "cpu:2"], rest="cpu:0")
            return trained(models[rank], ProcessGroupCommunicator(group))

    for found in run_thread_ranks(work, 2):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_devices_that_do_not_meet_are_noticed() -> None:
    """What the tests above rely on."""
    with CpuDevices():
        there = torch.ones(2, 2, requires_grad=True).to("cpu:1")
        assert str(there.device) == "cpu:1"
        with pytest.raises(RuntimeError, match="tensors on cpu, cpu:1"):
            there @ torch.ones(2, 2)
