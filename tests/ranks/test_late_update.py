"""Weights that are updated beside the next forward: every read finds them whole.

Between the steps of two ranks rank 0 alone reads a weight in one of many ways; the other goes on.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.core.torch_private import as_plain_tensors, storage_address, storage_uses
from gradsync.errors import ConfigError, RunError
from gradsync.runtime.store import wait_until
from gradsync.sync import late_update, pending
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.pending import is_pending
from gradsync.sync.reducer import Stopwatch
from gradsync.sync.replicate import replicate
from gradsync.sync.sharded_state import ShardedBucket
from support.engine_cases import pretend_hosts
from support.thread_ranks import run_thread_ranks


@pytest.fixture(autouse=True)
def _nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have."""
    monkeypatch.setattr(pending, "has_compiled", lambda: False)


class PlainMatmul(nn.Module):
    """Its forward hands the weight to code that torch does not ask, as a C++ extension's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        with as_plain_tensors():
            return x @ self.weight.as_subclass(Tensor)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 300), nn.Linear(300, 6)
        self.third, self.unused = PlainMatmul(), nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.tanh(self.first(x))))


class Trained:
    """One rank's model, optimizer and handle."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        self.model = options.pop("model", None) or Net()
        comm = ProcessGroupCommunicator(group)
        sizes = {"bucket_mb": 0.004, "first_bucket_mb": 0.001}
        options = {"collective": "backend", "overlap_publish": True} | sizes | options
        self.sync: GradientSync = replicate(
            self.model, sync=options.pop("sync", "invariant"), comm=comm, **options
        )
        # A thread of Gloo's that has sent a weight lets go of it when it next gets the processor;
        # until then the weight's memory is not the parameter's alone, and its update cannot wait.
        assert wait_until(self.weights_are_alone, time.monotonic() + 10)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.held = self.model.first.weight

    def weights_are_alone(self) -> bool:
        stores = (p.untyped_storage() for p in self.model.parameters())  # each is a use, too
        return all(storage_uses(storage_address(storage)) == 2 for storage in stores)

    def step(self, number: int, leaves: range, *, scale: Any = None, **more: Any) -> Any:
        for leaf in leaves:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + leaf))
            with self.sync.micro_step(last=leaf == leaves[-1], index=leaf):
                self.sync.backward(self.model(x).square().sum(), weight=4, scale=scale)
        return self.sync.step(self.optimizer, scale=scale, **more)

    def state(self) -> list[Tensor]:
        self.sync.wait()
        self.sync.gather(self.optimizer)
        entries = self.optimizer.state.values()
        state = [v for entry in entries for v in entry.values() if isinstance(v, Tensor)]
        return [t.detach().clone() for t in (*self.model.parameters(), *state)]


def in_a_thread(read: Callable[[], Tensor]) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


def saved(thing: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


def averaged(t: Trained) -> Tensor:
    """An average of weights over references that were taken before."""
    average = torch.zeros_like(t.held)
    torch._foreach_add_([average], [t.held])
    return average


def through_another_module(t: Trained) -> Tensor:
    other = nn.Linear(6, 300, bias=False)
    other.weight = t.held
    return other(torch.eye(6)).T


def inside_inference_mode(t: Trained) -> Tensor:
    with torch.inference_mode():
        return F.linear(torch.eye(6), t.held).T.clone()


def swapped(t: Trained) -> Tensor:
    """Content of another tensor that changes places with the weight for a moment."""
    other = nn.Parameter(torch.zeros(300, 6))
    torch.utils.swap_tensors(t.held, other)
    assert not t.held.any()
    read = other.detach().clone()
    torch.utils.swap_tensors(other, t.held)
    return read


def converted(t: Trained, *, by_swapping: bool) -> Tensor:
    """`module.to()`, by either of torch's two ways."""
    torch.__future__.set_swap_module_params_on_conversion(by_swapping)
    try:
        t.model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return t.held


def given_other_memory(t: Trained) -> Tensor:
    """`param.data = …`, as code that moves weights by itself does it."""
    t.held.data = t.held.data.clone()
    return t.held


def flat(t: Trained) -> Tensor:
    return nn.utils.parameters_to_vector(t.model.parameters())[: t.held.numel()]


WAYS: dict[str, Callable[[Trained], Tensor]] = {
    "held reference": lambda t: t.held.clone(),
    "attribute": lambda t: t.model.first.weight + 0,
    "parameters()": lambda t: next(iter(t.model.parameters())).detach().clone(),
    "named_parameters()": lambda t: dict(t.model.named_parameters())["first.weight"] * 1.0,
    "param_groups": lambda t: t.optimizer.param_groups[0]["params"][0].clone(),
    "state_dict": lambda t: t.model.state_dict()["first.weight"].clone(),
    "handle's weights": lambda t: t.sync.full_weights()["first.weight"].clone(),
    "data": lambda t: t.held.data.clone(),
    "detach": lambda t: t.held.detach().clone(),
    "numpy": lambda t: torch.from_numpy(t.held.detach().numpy().copy()),
    "tolist": lambda t: torch.tensor(t.held.tolist()),
    "index": lambda t: torch.stack([t.held[row] for row in range(300)]),
    "iteration": lambda t: torch.stack(list(t.held)),
    "storage": lambda t: (
        torch.tensor(list(t.held.untyped_storage()), dtype=torch.uint8)
        .view(torch.float32)
        .view(300, 6)
    ),
    "text": lambda t: t.held if "Parameter" in repr(t.held) else t.held * float("nan"),
    "function": lambda t: F.linear(torch.eye(6), t.held).T,
    "operator": lambda t: torch.ops.aten.linear(torch.eye(6), t.held).T,
    "average of held references": averaged,
    "another module": through_another_module,
    "functional_call": lambda t: (
        torch.func.functional_call(
            t.model.first,
            {"weight": t.model.first.weight, "bias": torch.zeros(300)},
            (torch.eye(6),),
        ).T
    ),
    "flattened": flat,
    "deepcopy of the model": lambda t: copy.deepcopy(t.model).first.weight,
    "deepcopy of a parameter": lambda t: copy.deepcopy(t.held),
    "pickle": lambda t: pickle.loads(pickle.dumps(t.held)),  # noqa: S301
    "torch.save of the model": lambda t: saved(t.model).first.weight,
    "torch.save of a state_dict": lambda t: saved(t.model.state_dict())["first.weight"],
    "another thread": lambda t: in_a_thread(lambda: t.held.detach().clone()),
    "inference mode": inside_inference_mode,
    "module whose forward torch does not ask": lambda t: t.model.third(torch.eye(6)),
    "optimizer.state": lambda t: t.optimizer.state[t.held]["exp_avg"].clone(),
    "optimizer.state_dict": lambda t: t.optimizer.state_dict()["state"][0]["exp_avg"].clone(),
    "deepcopy of the optimizer": lambda t: next(iter(copy.deepcopy(t.optimizer).state.values()))[
        "exp_avg"
    ],
    "copy of optimizer.state": lambda t: t.optimizer.state.copy()[t.held]["exp_avg"].clone(),
    "swap_tensors": swapped,
    "module.to": lambda t: converted(t, by_swapping=False),
    "module.to by swapping": lambda t: converted(t, by_swapping=True),
    "data = other memory": given_other_memory,
    "wait": lambda t: (t.sync.wait(), t.held.detach().clone())[1],
}


def read_after_two_steps(way: str, *, sync: str, late: bool) -> Tensor:
    """The tensor read by rank 0; all ranks must end with the same weights after one more step."""

    def work(rank: int, group: dist.ProcessGroup) -> tuple[Tensor | None, list[Tensor]]:
        trained, read = Trained(group, sync=sync, overlap_publish=late), None
        mine = range(1) if rank == 0 else range(1, 3)
        for number in range(3):
            trained.step(number, mine, clip_norm=0.5)
            if number == 1 and rank == 0:
                assert any(map(is_pending, trained.model.parameters())) is late
                read = WAYS[way](trained).detach().clone()
        found = trained.state()
        trained.sync.close()
        return read, found

    (read, first), (_, second) = run_thread_ranks(work, 2)
    assert all(map(torch.equal, first, second))
    assert read is not None
    return read


GATHERED = ("held reference", "state_dict", "numpy", "function", "another thread", "wait")
"""Ways that are tried with gathered weights too: the same marks wait for them."""


@pytest.mark.parametrize(
    ("way", "sync"),
    [*((way, "invariant") for way in WAYS), *((way, "zero1") for way in GATHERED)],
)
def test_whoever_reads_finds_the_step_done(way: str, sync: str) -> None:
    late, at_once = (read_after_two_steps(way, sync=sync, late=late) for late in (True, False))
    assert torch.equal(late, at_once)


def trained_weights(
    shares: list[range], *, options: dict[str, Any], hosts: int = 0, **step: Any
) -> list[list[Tensor]]:
    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        comm = ProcessGroupCommunicator(group)
        more = {"groups": pretend_hosts(comm, hosts)} if hosts else {}
        trained = Trained(group, **options, **more)
        norms = []
        for number in range(3):
            result = trained.step(number, shares[rank], **step)
            norms += [torch.zeros(())] if result.grad_norm is None else [result.grad_norm]
        found = [*trained.state(), *norms]
        trained.sync.close()
        return found

    return run_thread_ranks(work, len(shares))


def shares_of(*counts: int) -> list[range]:
    return [range(sum(counts[:rank]), sum(counts[: rank + 1])) for rank in range(len(counts))]


@pytest.mark.parametrize("sync", ["invariant", "invariant_bf16", "zero1"])
@pytest.mark.parametrize(
    ("counts", "hosts"),
    [
        ((2, 2), 0),
        ((2, 1, 1), 0),
        ((1, 1, 1, 1), 2),
        ((1,) * 8, 4),
        ((1, 1, 1, 1, 2, 1, 1, 1), 4),  # siblings in the tree on one host, not on the other
        ((1, 1, 1, 1, 4, 1, 1, 1), 2),
    ],
)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_bits_are_those_of_one_rank(
    sync: str, counts: tuple[int, ...], hosts: int, clip: float | None
) -> None:
    """Weights, optimizer state and norms; late and not; blocks of the norm that shards cut."""
    options = {"sync": sync}
    (alone,) = trained_weights(shares_of(sum(counts)), options=options, clip_norm=clip)
    late = trained_weights(shares_of(*counts), options=options, hosts=hosts, clip_norm=clip)
    for found in late:
        assert all(map(torch.equal, found, alone))


def test_options_of_the_step_hold_for_its_update() -> None:
    """A scheduler changes them before the update is done."""

    def work(_: int, group: dist.ProcessGroup, late: bool) -> list[Tensor]:
        trained = Trained(group, overlap_publish=late)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.3)
        rank = trained.sync.comm.rank
        for number in range(3):
            trained.step(number, range(rank, rank + 1))
            scheduler.step()
        found = trained.state()
        trained.sync.close()
        return found

    late = run_thread_ranks(lambda rank, group: work(rank, group, True), 2)[0]
    assert all(map(torch.equal, late, run_thread_ranks(lambda r, g: work(r, g, False), 2)[0]))


@pytest.mark.parametrize(
    ("waits", "hinders", "late"),
    [
        ((0.5, 0.2), "", True),
        ((0.5, 0.05), "", False),
        ((0.5, 0.2), "hook", False),
        ((0.5, 0.2), "scaler", False),
    ],
)
@pytest.mark.parametrize("sync", ["invariant", "bucketed"])
def test_auto_is_late_where_even_the_last_rank_waits_long(
    sync: str,
    waits: tuple[float, float],
    hinders: str,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank that could not be late (its optimizer has a hook, or a loss scaler looks at whole
    gradients) would wait for the second half alone."""
    local = threading.local()

    def clock() -> float:
        local.now += 4.0
        return local.now

    monkeypatch.setattr(late_update, "time", SimpleNamespace(perf_counter=clock))
    monkeypatch.setattr(Stopwatch, "seconds", lambda _: 4.0 * local.wait)

    def work(rank: int, group: dist.ProcessGroup, how: Any) -> tuple[list[bool], list[Tensor]]:
        local.wait, local.now = waits[rank], 0.0
        trained, found = Trained(group, sync=sync, overlap_publish=how), []
        if hinders == "hook" and rank:
            hook(trained)
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0) if hinders == "scaler" else None
        for number in range(7):
            trained.step(number, range(rank, rank + 1), clip_norm=0.5, scale=scaler)
            found.append(any(map(is_pending, trained.model.parameters())))
        state = trained.state()
        trained.sync.close()
        return found, state

    at_once = run_thread_ranks(lambda rank, group: work(rank, group, False), 2)
    ranks = run_thread_ranks(lambda rank, group: work(rank, group, "auto"), 2)
    for (found, state), (_, plain) in zip(ranks, at_once, strict=True):
        assert found == [False] * 4 + [late] * 3
        assert all(map(torch.equal, state, plain))


@pytest.mark.parametrize("least_wait", [0.0, 2.0])
def test_bits_do_not_depend_on_what_auto_chooses(
    least_wait: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of sums in any order neither: a resumed run begins with whole ones again."""
    monkeypatch.setattr(late_update, "_LEAST_WAIT", least_wait)

    def work(rank: int, group: dist.ProcessGroup, how: Any) -> list[Tensor]:
        trained = Trained(group, sync="bucketed", overlap_publish=how)
        for number in range(6):
            trained.step(number, range(rank, rank + 1), clip_norm=0.5)
        state = trained.state()
        trained.sync.close()
        return state

    late = run_thread_ranks(lambda rank, group: work(rank, group, True), 3)
    chosen = run_thread_ranks(lambda rank, group: work(rank, group, "auto"), 3)
    assert all(map(torch.equal, chosen[0], late[0]))


def alias(t: Trained) -> Any:
    return t.held.detach()


def array(t: Trained) -> Any:
    memory = t.held.detach().numpy().copy()
    t.held.data = torch.from_numpy(memory)
    return memory


def memory_of_its_own(t: Trained) -> Any:
    """A tensor that is the weight's memory from here on."""
    kept = t.held.detach().clone()
    t.held.data = kept
    return kept


def hook(t: Trained) -> Any:
    return t.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("why", "sync"),
    [
        *((why, "invariant") for why in (alias, array, hook, memory_of_its_own)),
        *((why, sync) for why in (alias, array, memory_of_its_own) for sync in ("zero1", "zero2")),
    ],
)
def test_who_could_not_be_asked_to_wait_finds_it_done(
    why: Callable[[Trained], Any], sync: str
) -> None:
    """Memory that another tensor shares, hooks that see gradients: one rank of two has them."""

    def work(rank: int, group: dist.ProcessGroup, late: bool) -> tuple[bool, list[Tensor]]:
        trained = Trained(group, sync=sync, overlap_publish=late)
        kept = why(trained) if rank == 0 else None
        for number in range(3):
            trained.step(number, range(rank, rank + 1), clip_norm=0.5)
        pending = any(map(is_pending, trained.model.parameters()))
        found = trained.state()
        trained.sync.close()
        assert kept is not None or rank
        return pending, found

    ranks = run_thread_ranks(lambda rank, group: work(rank, group, True), 2)
    assert [pending for pending, _ in ranks] == [False, True]
    at_once = run_thread_ranks(lambda rank, group: work(rank, group, False), 2)
    for (_, late), (_, plain) in zip(ranks, at_once, strict=True):
        assert all(map(torch.equal, late, plain))


def test_compiled_code_is_not_left_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending, "has_compiled", lambda: True)

    def work(rank: int, group: dist.ProcessGroup) -> bool:
        trained = Trained(group)
        trained.step(0, range(rank, rank + 1))
        pending = any(map(is_pending, trained.model.parameters()))
        trained.sync.close()
        return pending

    assert run_thread_ranks(work, 2) == [False, False]


def check_late_is_at_once(work: Callable[[int, dist.ProcessGroup, bool], list[Tensor]]) -> None:
    """On two ranks, what `work` finds with late updates, and without."""
    late = run_thread_ranks(lambda rank, group: work(rank, group, True), 2)
    at_once = run_thread_ranks(lambda rank, group: work(rank, group, False), 2)
    for found, plain in zip(late, at_once, strict=True):
        assert len(found) == len(plain)
        assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("sync", ["invariant", "zero1"])
def test_a_class_of_the_users_stays(sync: str) -> None:
    """A parameter of another class is never marked, nor changed."""

    class Named(nn.Parameter):
        pass

    def work(rank: int, group: dist.ProcessGroup) -> bool:
        model = Net()
        model.first.weight = Named(model.first.weight.detach())
        trained = Trained(group, sync=sync, model=model)
        for number in range(2):
            trained.step(number, range(rank, rank + 1))
        trained.sync.close()
        return type(trained.held) is Named

    assert run_thread_ranks(work, 2) == [True, True]


@pytest.mark.parametrize("sync", ["zero1", "zero2"])
def test_a_hook_after_the_step_finds_gathered_weights(sync: str) -> None:
    def work(rank: int, group: dist.ProcessGroup, late: bool) -> list[Tensor]:
        trained, seen = Trained(group, sync=sync, overlap_publish=late), []
        trained.optimizer.register_step_post_hook(
            lambda *_: seen.append(trained.held.detach().clone())
        )
        for number in range(3):
            trained.step(number, range(rank, rank + 1))
        found = [*trained.state(), *seen]
        trained.sync.close()
        return found

    check_late_is_at_once(work)


@pytest.mark.parametrize("sync", ["invariant", "zero1"])
def test_a_first_touch_by_a_tensor_that_is_not_real_still_updates(sync: str) -> None:
    with (
        FakeTensorMode()
    ):  # where there is no GPU, the first one replaces CUDA's guard for all threads
        pass

    def work(rank: int, group: dist.ProcessGroup, late: bool) -> list[Tensor]:
        trained = Trained(group, sync=sync, overlap_publish=late)
        trained.step(0, range(rank, rank + 1))
        with FakeTensorMode(allow_non_fake_inputs=True):
            trained.model.first(torch.ones(1, 6))
        first = [p.detach().clone() for p in trained.model.parameters()]
        trained.step(1, range(rank, rank + 1))
        found = [*first, *trained.state()]
        trained.sync.close()
        return found

    check_late_is_at_once(work)


@pytest.mark.parametrize("sync", ["invariant", "zero1"])
def test_weights_that_never_come_can_be_loaded_after_close(
    sync: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sums, or the gather, of one bucket fail on both ranks."""

    class Lost:
        def wait(self) -> None:
            raise RunError("connection closed by peer")

    def work(rank: int, group: dist.ProcessGroup) -> None:
        trained = Trained(group, sync=sync)
        saved = {name: t.clone() for name, t in trained.model.state_dict().items()}
        trained.step(0, range(rank, rank + 1))
        trained.sync.reducer.shards._weights._works[0] = Lost()
        with pytest.raises(RunError, match="closed by peer"):
            nn.utils.parameters_to_vector(trained.model.parameters())
        assert any(map(is_pending, trained.model.parameters()))
        trained.sync.close()
        trained.sync.close()
        trained.model.load_state_dict(saved)
        assert not any(map(is_pending, trained.model.parameters()))
        assert not any(module._forward_pre_hooks for module in trained.model.modules())
        assert all(torch.equal(t, saved[name]) for name, t in trained.model.state_dict().items())

    run_thread_ranks(work, 2)
    assert "did not all arrive (connection closed by peer): go back to a checkpoint" in caplog.text


def test_gathered_copies_go_when_weights_have_come() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> bool:
        trained = Trained(group, sync="zero1")
        buffers: list[Any] = []
        plain = ShardedBucket.gather

        def watched(bucket: ShardedBucket, shard: Tensor) -> Any:
            flat, sent = plain(bucket, shard)
            buffers.append(weakref.ref(flat))
            return flat, sent

        with patch.object(ShardedBucket, "gather", watched) if rank == 0 else nullcontext():
            trained.step(0, range(rank, rank + 1))
        trained.sync.wait()
        gc.collect()
        # Gloo's thread lets go of what it has sent when it next gets the processor.
        gone = wait_until(lambda: all(b() is None for b in buffers), time.monotonic() + 10)
        trained.sync.close()
        return gone and bool(buffers) == (rank == 0)

    assert run_thread_ranks(work, 2) == [True, True]


@pytest.mark.parametrize("sync", ["invariant", "zero1"])
def test_a_copy_of_the_model_has_no_hooks_and_goes_its_own_way(sync: str) -> None:
    def work(rank: int, group: dist.ProcessGroup) -> None:
        trained = Trained(group, sync=sync)
        trained.step(0, range(rank, rank + 1))
        copied = copy.deepcopy(trained.model.second)
        assert not copied._forward_pre_hooks
        assert not any(map(is_pending, trained.model.parameters()))
        trained.step(1, range(rank, rank + 1))
        other = nn.Parameter(torch.zeros(300, 6))
        torch.utils.swap_tensors(trained.held, other)
        assert torch.equal(trained.held + 0, torch.zeros(300, 6))
        assert not is_pending(trained.held)
        trained.sync.close()

    run_thread_ranks(work, 2)


def test_a_group_that_is_added_does_not_end_the_overlap() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[bool]:
        trained, pending = Trained(group, sync="zero1"), []
        first, *others = list(trained.model.parameters())
        trained.optimizer = torch.optim.AdamW(others, lr=0.1)
        for number in range(4):
            if number == 2:
                trained.optimizer.add_param_group({"params": [first]})
            trained.step(number, range(rank, rank + 1))
            pending.append(any(map(is_pending, trained.model.parameters())))
            for parameter in trained.model.parameters():
                parameter.grad = None
            assert any(map(is_pending, trained.model.parameters())) is pending[-1]
        trained.sync.close()
        return pending

    assert run_thread_ranks(work, 2) == [[True] * 4] * 2


def test_shape_and_the_like_are_told_at_once() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> bool:
        trained = Trained(group)
        trained.step(0, range(rank, rank + 1))
        weight = trained.held
        told = (weight.shape, weight.dtype, weight.device, weight.grad, weight.requires_grad)
        assert told == (torch.Size([300, 6]), torch.float32, torch.device("cpu"), None, True)
        assert isinstance(weight, nn.Parameter)
        pending = is_pending(weight)
        trained.sync.close()
        assert type(weight) is nn.Parameter
        return pending

    assert run_thread_ranks(work, 2) == [True, True]


def test_a_step_in_the_users_loop_leaves_nothing_for_later() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        trained = Trained(group)
        trained.step(0, range(rank, rank + 1))
        trained.model(torch.ones(2 + rank, 6)).mean().backward()
        assert all(p.grad is not None for p in trained.model.second.parameters())
        trained.optimizer.step()
        assert not any(map(is_pending, trained.model.parameters()))
        found = trained.state()
        trained.sync.close()
        return found

    first, second = run_thread_ranks(work, 2)
    assert all(map(torch.equal, first, second))


def test_a_refused_step_leaves_nothing_behind() -> None:
    """Ranks step with other learning rates; then one has no targets, and then all go on."""

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        trained = Trained(group)
        before = trained.state()
        trained.optimizer.param_groups[0]["lr"] = 0.1 + rank
        with pytest.raises(ConfigError, match="lr"):
            trained.step(0, range(rank, rank + 1))
        trained.optimizer.param_groups[0]["lr"] = 0.1
        trained.sync.discard()
        assert all(map(torch.equal, trained.state(), before))
        trained.step(1, range(rank, rank + 1))
        found = trained.state()
        trained.sync.close()
        return found

    first, second = run_thread_ranks(work, 2)
    assert all(map(torch.equal, first, second))


def test_a_thread_that_reads_during_an_update_waits_for_its_end() -> None:
    """Another one has begun it."""

    def work(rank: int, group: dist.ProcessGroup) -> bool:
        trained = Trained(group, bucket_mb=25.0, first_bucket_mb=25.0)
        trained.step(0, range(rank, rank + 1))
        inside, waited, found = threading.Event(), threading.Event(), []
        shards = trained.sync.reducer.shards
        enclosed = shards.updates

        @contextmanager
        def slow(parameters: Any) -> Iterator[None]:
            inside.set()
            waited.wait(0.2)
            with enclosed(parameters):
                yield

        shards.updates = slow
        reader = threading.Thread(target=lambda: found.append(trained.held.detach().clone()))
        first = threading.Thread(target=trained.model.state_dict)
        first.start()
        inside.wait()
        reader.start()
        first.join()
        reader.join()
        same = torch.equal(found[0], trained.held)
        trained.sync.close()
        return same

    assert run_thread_ranks(work, 2) == [True, True]


def test_an_optimizer_that_keeps_nothing_has_no_entries() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> int:
        trained = Trained(group)
        trained.optimizer = torch.optim.SGD(trained.model.parameters(), lr=0.1)
        trained.step(0, range(rank, rank + 1))
        found = len(trained.optimizer.state)
        trained.sync.close()
        return found

    assert run_thread_ranks(work, 2) == [0, 0]


@pytest.mark.parametrize("how", [True, "auto"])
def test_users_loops_decide_nothing_for_those_who_asked(how: Any) -> None:
    """Sums of `loss.backward()` are whole, whatever the option says."""

    def work(rank: int, group: dist.ProcessGroup) -> list[bool]:
        trained, found = Trained(group, overlap_publish=how), []
        for _ in range(5):
            trained.model(torch.ones(4, 6)).square().sum().backward()
            trained.optimizer.step()
            trained.optimizer.zero_grad()
        for number in range(2):
            trained.step(number, range(rank, rank + 1))
            found.append(any(map(is_pending, trained.model.parameters())))
        trained.sync.close()
        return found

    with patch.object(late_update, "_LEAST_WAIT", 2.0):
        assert run_thread_ranks(work, 2) == [[how is True] * 2] * 2
