"""One rank of the checks that tests/gpu/run.py starts: `ranks.py FOLDER CHECK [CHECK ...]`.

Each check is a function here. Rank 0 prints a line of JSON for each, with what it found; what runs
of different sizes must have in common goes into FOLDER.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync as gs
from gradsync.comm.groups import Subset
from gradsync.comm.p2p_collectives import hierarchical_all_reduce, ring_all_reduce
from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.commands.models.config import GPTConfig
from gradsync.commands.models.gpt import GPT, loss_sum
from gradsync.core.torch_private import process_groups
from gradsync.sync.registry import STRATEGIES

STEPS, LEAVES, TOKENS = 4, 6, 32
SIZES = {"global_batch_size": 2 * LEAVES, "micro_batch_size": 2, "num_epochs": 1}
MIB = 2**20
Found = dict[str, Any]


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sequences of tokens and their targets."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        size = (STEPS * LEAVES * 2, TOKENS + 1)
        self.tokens = torch.randint(0, 64, size, generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index, :-1], self.tokens[index, 1:]


class Shaken:
    """Lets each rank's device be late at other places, so that a stream that does not wait for
    another reads what is not there yet."""

    def __init__(self, rank: int, *, on: bool) -> None:
        self._random, self._on = random.Random(rank), on

    def __call__(self, *_: Any) -> None:
        if self._on and torch.cuda.is_available():
            torch.cuda._sleep(self._random.randrange(20_000_000))  # type: ignore[attr-defined]
        elif self._on:
            time.sleep(self._random.random() / 200)


def options_of(name: str) -> Found:
    """Options with which a strategy runs everywhere, and by messages."""
    if name in ("local_sgd", "diloco"):
        return {"inner_steps": 1}
    own: Found = {"collective": "backend"} if "collective" in STRATEGIES[name].options else {}
    in_buckets = getattr(STRATEGIES[name].recipe, "grouping", "") == "buckets"
    return own | ({"bucket_mb": 0.05, "first_bucket_mb": 0.01} if in_buckets else {})


def trained(
    world: gs.World, name: str, *, bf16: bool, shake: bool = False, loses: int = -1, **more: Any
) -> dict[str, Tensor]:
    """Whole weights, on the CPU, after some steps with dropout and clipping; in several buckets,
    with an embedding of more than one block of the norm. In the second step that rank is lost."""
    sizes: Found = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 2048}
    shape = GPTConfig(**sizes, block_size=TOKENS, dropout=0.1)
    model = GPT(shape, seed=0).to(world.device)
    shaken = Shaken(world.rank, on=shake)
    for block in model.blocks:
        block.register_forward_hook(shaken)
    sync = gs.replicate(model, world, strategy=name, **options_of(name) | more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = gs.loader(Data(), world, **SIZES)
    for step in loader:
        for attempt in sync.attempts(step):
            with attempt:
                for leaf in step:
                    with sync.micro_step(last=leaf.is_last, index=leaf.index):
                        with torch.autocast(world.device.type, torch.bfloat16, enabled=bf16):
                            tokens, targets = (
                                x.to(world.device) for x in (leaf.inputs, leaf.targets)
                            )
                            loss = loss_sum(sync.forward(tokens), targets)
                        sync.backward(loss, leaf, reduction="sum")
                shaken()
                if (step.number, world.rank, world.world_size) == (1, loses, 3):
                    os.kill(os.getpid(), signal.SIGKILL)
                sync.step(optimizer, clip_norm=0.5)
    weights = {name: tensor.cpu() for name, tensor in sync.replica.full_weights().items()}
    sync.close()
    return weights


def plain(world: gs.World, _: Path) -> Found:
    """Torch alone: four collectives, and messages in both directions."""
    one = torch.full((1000,), world.rank + 1.0, device=world.device)
    dist.all_reduce(total := one.clone())
    dist.broadcast(first := one.clone(), 0)
    gathered = one.new_empty(1000 * world.world_size)
    dist.all_gather_into_tensor(gathered, one)
    dist.reduce_scatter_tensor(part := one.clone(), gathered)
    peer, other = world.rank ^ 1, torch.empty_like(one)
    if peer < world.world_size:
        asked = [dist.P2POp(dist.irecv, other, peer), dist.P2POp(dist.isend, one, peer)]
        for work in dist.batch_isend_irecv(asked):
            work.wait()
        assert other[0].item() == peer + 1
    assert total[0].item() == sum(range(1, world.world_size + 1))
    assert first[0].item() == 1
    assert part[0].item() == world.world_size * (world.rank + 1)
    return {"backend": str(dist.get_backend(dist.group.WORLD))}


def exchanges(world: gs.World, _: Path) -> Found:
    """Messages, rings and hierarchies: the bits that Gloo brings."""
    world_size, rank = world.world_size, world.rank
    comm = ProcessGroupCommunicator(dist.new_group(list(range(world_size))))
    everyone = Subset(comm, channel=7)

    def messages(flat: Tensor) -> Tensor:
        """Two to each peer, and an empty one."""
        sends = [
            (flat[i::2].contiguous(), p) for p in range(world_size) for i in (0, 1) if p != rank
        ]
        got = [(torch.empty_like(tensor), peer) for tensor, peer in sends]
        empty = [(flat[:0], p) for p in range(world_size) if p != rank]
        everyone.exchange(sends + empty, got + empty).wait()
        return torch.cat([tensor for tensor, _ in got])

    def part(flat: Tensor) -> Tensor:
        """Between the first and the last rank alone."""
        ends = (0, world_size - 1)
        if rank in ends:
            ring_all_reduce(Subset(everyone, ends), flat, "sum")
        return flat

    def ring(flat: Tensor) -> Tensor:
        ring_all_reduce(everyone, flat, "sum")
        return flat

    def hosts(flat: Tensor) -> Tensor:
        """As if each rank were alone on its host."""
        alone, all_ranks = Subset(everyone, [rank]), Subset(everyone, range(world_size))
        hierarchical_all_reduce(alone, all_ranks, flat, "sum", equal_nodes=True)
        return flat

    start = torch.randn(4099, generator=torch.Generator().manual_seed(rank))
    for run in (messages, part, ring, hosts):
        here, there = run(start.clone()), run(start.to(world.device))
        assert torch.equal(here, there.cpu()), run.__name__
    dist.destroy_process_group(comm.group)
    return {"compared": 4}


def one_hash(world: gs.World, _: Path) -> Found:
    """Weights in bf16, for run.py to compare between numbers of ranks."""
    names = [n for n in ("invariant", "zero1") if world.one_host or n == "invariant"]
    ways: list[tuple[str, str, Found]] = [(name, name, {}) for name in names]
    ways += [(f"late {name}", name, {"overlap_publish": True}) for name in names]
    return {
        said: gs.weights_sha256(trained(world, name, bf16=True, **more).items())[:16]
        for said, name, more in ways
    }


def survives(world: gs.World, _: Path) -> Found:
    """One rank of three is lost: the others go on, with the same bits."""
    weights = trained(world, "invariant", bf16=True, loses=1)
    assert world.world_size == 2
    return {"invariant": gs.weights_sha256(weights.items())[:16]}


def some_ranks(world: gs.World, _: Path) -> Found:
    """Handles on groups of the first two ranks and of the others, one after the other."""
    ranks = range(world.world_size)
    for parts in ([[0, 1], [*ranks[2:]]], [[0, 1]]):
        groups = [gs.group(part) for part in parts]
        comm = next((each for each in groups if each is not None), None)
        if comm is None:
            continue
        model = nn.Linear(64, 64).to(world.device)
        nn.init.constant_(model.weight, 0.1)
        sync = gs.replicate(model, comm=comm, collective="backend")
        rank, size = comm.rank, comm.world_size
        sync.backward(
            model(torch.full((1, 64), rank + 1.0, device=world.device)).sum(),
            weight=1,
            reduction="sum",
        )
        sync.step(torch.optim.SGD(model.parameters(), lr=1.0))
        assert (model.weight - 0.1 + (size + 1) / 2).abs().max().item() < 1e-5
        sync.close()
    return {"groups": 3}


def shaken(world: gs.World, _: Path) -> Found:
    """As `one_hash`, with ranks that are late; and how often a step waits for the device."""
    found = gs.weights_sha256(trained(world, "invariant", bf16=True, shake=True).items())[:16]
    if world.device.type != "cuda":
        return {"invariant": found}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        trained(world, "invariant", bf16=True)
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(each.message) for each in said)
    return {"invariant": found, "host waits a step": round(waits / STEPS, 1)}


def strategies(world: gs.World, folder: Path) -> Found:
    """Each strategy beside one rank's weights, in fp32."""
    found: Found = {}
    for name, strategy in STRATEGIES.items():
        weights = trained(world, name, bf16=False)
        path = folder / f"{name}.pt"
        if world.world_size == 1:
            torch.save(weights, path)
            continue
        alone = torch.load(path)
        far = max(float((weights[n] - alone[n]).abs().max()) for n in alone)
        kept = far == 0 if strategy.same_on_any_ranks else far < 1e-4 or strategy.promise == "lossy"
        assert kept, f"{name}: {far:.1e} from one rank's weights"
        found[name] = f"{far:.0e}"
    return found


def own_loop(world: gs.World, _: Path) -> Found:
    """`loss.backward()` gives the mean over ranks, as DDP does."""
    for name in ("invariant", "bucketed", "naive"):
        model = nn.Linear(64, 64).to(world.device)
        nn.init.constant_(model.weight, 0.1)
        sync = gs.replicate(model, world, strategy=name, **options_of(name))
        model(torch.full((4, 64), world.rank + 1.0, device=world.device)).mean().backward()
        mean = (world.world_size + 1) / 2 / 64
        assert (model.weight.grad - mean).abs().max().item() < 1e-6, name
        sync.close()
    return {"strategies": 3}


def closes(world: gs.World, _: Path) -> Found:
    """Handles that come and go leave neither memory nor groups."""

    def once() -> None:
        model = nn.Linear(256, 256).to(world.device)
        handle = gs.replicate(model, world, collective="backend")
        handle.backward(
            model(torch.ones(2, 256, device=world.device)).sum(), weight=2, reduction="sum"
        )
        handle.step(torch.optim.SGD(model.parameters(), lr=0.1))
        handle.close()

    def free() -> float:
        if world.device.type != "cuda":
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0] / MIB

    once()
    before, groups = free(), len(process_groups())
    for _round in range(20):
        once()
    lost = before - free()
    assert lost < 64, f"{lost:.0f} MiB lost in 20 handles"
    assert len(process_groups()) == groups
    return {"MiB lost": round(lost, 1), "groups": groups}


def fails(world: gs.World, folder: Path) -> Found:
    """Rank 1 ends, or stands, in its second step; FOLDER's name says how."""
    model = nn.Linear(256, 256).to(world.device)
    sync = gs.replicate(model, world, collective="backend")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number in range(3):
        if (number, world.rank) == (1, 1):
            how = folder.name
            if how == "exception":
                raise ValueError("a fault of rank 1")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "host stands":
                threading.Event().wait()
            if how == "device stands":
                torch.cuda._sleep(2**40)  # type: ignore[attr-defined]
        sync.backward(
            model(torch.ones(2, 256, device=world.device)).sum(), weight=2, reduction="sum"
        )
        sync.step(optimizer)
    torch.cuda.synchronize() if world.device.type == "cuda" else None
    return {}


CHECKS = {
    check.__name__: check
    for check in (
        *(plain, exchanges, one_hash, strategies, own_loop, shaken, survives, some_ranks, closes),
        fails,
    )
}


def main() -> None:
    """Run the checks that the command line names, one after the other."""
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    device = os.environ["GPU_CHECKS_DEVICE"]
    limit_s = 15.0 if "fails" in names else 120.0
    if device == "cuda":
        torch.use_deterministic_algorithms(True)
    on_loss = "shrink" if "survives" in names else "end"
    options = {"device": device, "timeout_s": limit_s, "on_loss": on_loss}
    with gs.init(seed=0, threads=1, **options) as world:
        for name in names:
            faulthandler.dump_traceback_later(120, exit=True)
            began = time.monotonic()
            found = CHECKS[name](world, folder)
            if world.is_main:
                seconds = round(time.monotonic() - began, 1)
                print(json.dumps({"check": name, "seconds": seconds, "found": found}), flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
