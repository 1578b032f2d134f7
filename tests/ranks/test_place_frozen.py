"""Frozen submodules on other devices, around a trainable rest."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gradsync.comm.base import Communicator
from gradsync.comm.groups import SingleCommunicator
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.commands.plan.description import Device, Hardware, Host, Link
from gradsync.compat.elastic_gpu import (
    ElasticGPUConfig,
    FrozenPart,
    FrozenPlacement,
    PartPlace,
    frozen_parts,
    place_frozen,
)
from gradsync.data.loader import loader
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
        return self.head(self.llama(x, factor=x)["out"] * self.qwen(x))


def two_and_one() -> FrozenPlacement:
    places = {"llama": PartPlace(devices=(0, 1), first_blocks=2), "qwen": PartPlace(devices=(2,))}
    return FrozenPlacement(places=places, left=(0, 0, 0))


def test_frozen_parts_are_found_with_their_blocks() -> None:
    linear = 4 * (16 + 4)
    llama, qwen = frozen_parts(Pair())
    assert llama == FrozenPart(name="llama", num_bytes=6 * linear + 16, blocks=(linear,) * 4)
    assert qwen == FrozenPart(name="qwen", num_bytes=linear, blocks=(linear, 0))


def test_tensors_go_where_they_belong() -> None:
    """The meta device stands for another one."""
    model = Pair()
    place_frozen(model, two_and_one(), ["cpu", "meta", "meta"])
    homes = {name: p.device.type for name, p in model.named_parameters()}
    assert {name for name, home in homes.items() if home == "meta"} == {
        *(f"llama.layers.{i}.{what}" for i in (2, 3) for what in ("weight", "bias")),
        *("qwen.0.weight", "qwen.0.bias"),
    }


@pytest.fixture
def new_parameters() -> Iterator[None]:
    """Modules get new parameters where they move, as to devices of another type."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def trained(model: Pair, comm: Communicator, *, whole: bool = False) -> dict[str, Tensor]:
    """Its weights after two steps of four samples."""
    trains = nn.ModuleList([model.encoder, model.head])
    sync = replicate(model if whole else trains, comm=comm)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = TensorDataset(torch.arange(32.0).sin().view(8, 4), torch.arange(8.0).cos().view(8, 1))
    world = World(
        rank=comm.rank,
        world_size=comm.world_size,
        local_rank=comm.rank,
        local_world_size=comm.world_size,
    )
    batches = loader(data, world, global_batch_size=4, micro_batch_size=1, seed_micro_batches=False)
    for step in islice(batches, 2):
        for leaf in step:
            loss = (model(leaf.inputs) - leaf.targets).square().sum()
            sync.backward(loss, leaf, reduction="sum")
        sync.step(optimizer)
    assert all(p.grad is None for p in (*model.llama.parameters(), *model.qwen.parameters()))
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


def test_frozen_parts_may_be_in_what_is_replicated() -> None:
    models = [Pair() for _ in range(2)]

    def work(rank: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        place_frozen(models[rank], two_and_one(), ["cpu"] * 3)
        return trained(models[rank], ProcessGroupCommunicator(group), whole=True)

    expected = trained(Pair(), SingleCommunicator())
    for found in run_thread_ranks(work, 2):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_devices_that_do_not_meet_are_noticed() -> None:
    """The tests above rely on this error."""
    with CpuDevices():
        there = torch.ones(2, 2, requires_grad=True).to("cpu:1")
        assert str(there.device) == "cpu:1"
        with pytest.raises(RuntimeError, match="tensors on cpu, cpu:1"):
            there @ torch.ones(2, 2)
