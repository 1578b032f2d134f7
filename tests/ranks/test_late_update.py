"""Weights that are updated when the next forward needs them: the bits of an update at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gradsync.comm.process_group import ProcessGroupCommunicator
from gradsync.errors import ConfigError, RunError
from gradsync.sync import late_update, replicas
from gradsync.sync.gradient_sync import GradientSync
from gradsync.sync.replicate import replicate
from gradsync.sync.watch import Stopwatch
from support.engine_cases import pretend_hosts
from support.thread_ranks import run_thread_ranks


class Net(nn.Module):
    """Its forward reads the weight of `third` by itself."""

    read_after: ClassVar[dict[str, str]] = {"third": "second"}

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 300), nn.Linear(300, 6)
        self.third = nn.Linear(6, 50)  # fills a bucket: it must not arrive with `second`
        self.unused = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(7)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.second(torch.tanh(self.first(x))), self.third.weight)


class Trained:
    """One rank's model, optimizer and handle."""

    def __init__(self, group: dist.ProcessGroup, **options: Any) -> None:
        self.model = options.pop("model", None) or Net()
        comm = ProcessGroupCommunicator(group)
        sizes = {"bucket_mb": 0.004, "first_bucket_mb": 0.001}
        options = {"collective": "backend", "overlap_publish": True} | sizes | options
        self.sync: GradientSync = replicate(
            self.model, strategy=options.pop("sync", "invariant"), comm=comm, **options
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.held = self.model.first.weight

    def step(self, number: int, leaves: range, *, scale: Any = None, **more: Any) -> Any:
        for leaf in leaves:
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + leaf))
            with self.sync.micro_step(last=leaf == leaves[-1], index=leaf):
                self.sync.backward(
                    self.model(x).square().sum(), weight=4, scale=scale, reduction="sum"
                )
        return self.sync.step(self.optimizer, scale=scale, **more)

    @property
    def waits(self) -> bool:
        """Whether updates of weights are still to be made."""
        weights = self.sync.replica.waiting
        return weights is not None and bool(weights._works)

    def end(self) -> list[Tensor]:
        """Close the handle; returns the state."""
        found = self.state()
        self.sync.close()
        return found

    def state(self) -> list[Tensor]:
        self.sync.replica.gather(self.optimizer)
        entries = self.optimizer.state.values()
        state = [v for entry in entries for v in entry.values() if isinstance(v, Tensor)]
        return [t.detach().clone() for t in (*self.model.parameters(), *state)]


READS: dict[str, Callable[[Trained], Tensor]] = {
    "full_weights": lambda t: t.sync.replica.full_weights()["third.weight"],
    "gather": lambda t: (t.sync.replica.gather(t.optimizer), t.optimizer.state[t.held]["exp_avg"])[
        1
    ],
    "check_replicas": lambda t: (t.sync.check_replicas(), t.held)[1],
    "evaluation": lambda t: t.model(torch.eye(6)),
    "inference mode": lambda t: inferred(t.model),
    "wait": lambda t: (t.sync.replica.wait(), t.held)[1],
}
"""How `gradsync train` reads weights and state between two steps."""


@torch.inference_mode()
def inferred(model: Net) -> Tensor:
    return model(torch.eye(6)).clone()


@pytest.mark.parametrize("sync", ["invariant", "zero1"])
@pytest.mark.parametrize("way", READS)
def test_who_reads_between_steps_finds_the_update_done(way: str, sync: str) -> None:
    def work(rank: int, group: dist.ProcessGroup, late: bool) -> list[Tensor]:
        trained = Trained(group, sync=sync, overlap_publish=late)
        for number in range(2):  # ranks decide in the first
            trained.step(number, range(rank, rank + 1), clip_norm=0.5)
        assert trained.waits is late
        read = READS[way](trained).detach().clone()
        if way == "gather":
            trained.sync.replica.scatter(trained.optimizer)
        trained.step(2, range(rank, rank + 1))
        return [read, *trained.end()]

    check_late_is_at_once(work)


@pytest.mark.parametrize("how", [True, "auto"])
def test_a_scripts_model_is_not_updated_late(how: Any) -> None:
    """A script may read weights before the next forward."""
    with pytest.raises(ConfigError, match="only `gradsync train` takes it"):
        replicate(nn.Linear(2, 2), overlap_publish=how)


def trained_weights(
    shares: list[range], *, options: dict[str, Any], hosts: int = 0, **step: Any
) -> list[list[Tensor]]:
    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        comm = ProcessGroupCommunicator(group)
        more = {"hosts": pretend_hosts(comm, hosts)} if hosts else {}
        trained = Trained(group, **options, **more)
        norms = []
        for number in range(3):
            result = trained.step(number, shares[rank], **step)
            norms += [torch.zeros(())] if result.grad_norm is None else [result.grad_norm]
        return [*trained.end(), *norms]

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

    def work(rank: int, group: dist.ProcessGroup, late: bool) -> list[Tensor]:
        trained = Trained(group, overlap_publish=late)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(trained.optimizer, 0.3)
        for number in range(3):
            trained.step(number, range(rank, rank + 1))
            scheduler.step()
        return trained.end()

    check_late_is_at_once(work)


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
    sync: str, waits: tuple[float, float], hinders: str, late: bool, monkeypatch: pytest.MonkeyPatch
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
            found.append(trained.waits)
        return found, trained.end()

    at_once = run_thread_ranks(lambda rank, group: work(rank, group, False), 2)
    ranks = run_thread_ranks(lambda rank, group: work(rank, group, "auto"), 2)
    for (found, state), (_, plain) in zip(ranks, at_once, strict=True):
        assert found == [False] * 4 + [late] * 3
        assert all(map(torch.equal, state, plain))


def hook(t: Trained) -> Any:
    return t.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize("hinders", ["hook", "compiled"])
def test_all_ranks_update_at_once_if_one_cannot_wait(
    hinders: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook on one rank sees gradients; compiled code is not left to wait."""
    if hinders == "compiled":
        for module in (late_update, replicas):
            monkeypatch.setattr(module, "has_compiled", lambda: True)

    def work(rank: int, group: dist.ProcessGroup) -> list[bool]:
        trained, found = Trained(group), []
        if rank == 0 and hinders == "hook":
            hook(trained)
        for number in range(3):
            trained.step(number, range(rank, rank + 1), clip_norm=0.5)
            found.append(trained.waits)
        trained.sync.close()
        return found

    assert run_thread_ranks(work, 2) == [[False] * 3] * 2


def check_late_is_at_once(work: Callable[[int, dist.ProcessGroup, bool], list[Tensor]]) -> None:
    """On two ranks, what `work` finds with late updates, and without."""
    late = run_thread_ranks(lambda rank, group: work(rank, group, True), 2)
    at_once = run_thread_ranks(lambda rank, group: work(rank, group, False), 2)
    for found, plain in zip(late, at_once, strict=True):
        assert len(found) == len(plain)
        assert all(map(torch.equal, found, plain))


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
        for number in range(2):
            trained.step(number, range(rank, rank + 1))
        trained.sync.reducer.shards.waiting._works[0] = Lost()
        with pytest.raises(RunError, match="closed by peer"):
            trained.sync.replica.wait()
        assert trained.waits
        trained.sync.close()
        trained.sync.close()
        trained.model.load_state_dict(saved)
        assert not trained.waits
        assert not any(module._forward_pre_hooks for module in trained.model.modules())
        assert all(torch.equal(t, saved[name]) for name, t in trained.model.state_dict().items())

    run_thread_ranks(work, 2)
    assert "did not all arrive (connection closed by peer): go back to a checkpoint" in caplog.text


def test_a_step_in_the_users_loop_leaves_nothing_for_later() -> None:
    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        trained = Trained(group)
        for number in range(2):
            trained.step(number, range(rank, rank + 1))
        trained.model(torch.ones(2 + rank, 6)).mean().backward()
        assert all(p.grad is not None for p in trained.model.second.parameters())
        trained.optimizer.step()
        assert not trained.waits
        return trained.end()

    first, second = run_thread_ranks(work, 2)
    assert all(map(torch.equal, first, second))


def test_a_refused_step_leaves_nothing_behind() -> None:
    """Ranks step with other learning rates; then one has no targets, and then all go on."""

    def work(rank: int, group: dist.ProcessGroup) -> list[Tensor]:
        trained = Trained(group)
        trained.step(0, range(rank, rank + 1))
        before = trained.state()
        trained.optimizer.param_groups[0]["lr"] = 0.1 + rank
        with pytest.raises(ConfigError, match="lr"):
            trained.step(1, range(rank, rank + 1))
        trained.optimizer.param_groups[0]["lr"] = 0.1
        trained.sync.discard()
        assert all(map(torch.equal, trained.state(), before))
        trained.step(2, range(rank, rank + 1))
        return trained.end()

    first, second = run_thread_ranks(work, 2)
    assert all(map(torch.equal, first, second))


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
            found.append(trained.waits)
        trained.sync.close()
        return found

    assert run_thread_ranks(work, 2) == [[False, how is True]] * 2
