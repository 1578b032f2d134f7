"""Round machines and models, whose times can be reckoned by hand."""

from __future__ import annotations

from typing import Any

from gradsync.commands.models.config import GPTConfig
from gradsync.commands.parallel.layout import ParallelLayout
from gradsync.commands.plan.description import Device, Hardware, Host, Kind, Link
from gradsync.commands.plan.measured import Fit
from gradsync.commands.plan.profile import StepProfile
from gradsync.commands.plan.workload import Split, Workload

MODEL = GPTConfig(n_layer=2, n_head=2, n_embd=8, vocab_size=16, block_size=8)
NEAR = Link(name="near", alpha_s=1e-3, bytes_per_s=1e6)
FAR = Link(name="far", alpha_s=2e-3, bytes_per_s=1e5)


def work(leaves: int, **changes: Any) -> Workload:
    """Leaves of 2 x 8 tokens."""
    about = {"model": MODEL, "micro_batch_size": 2, "seq_len": 8, "num_leaves": leaves}
    return Workload(**about | changes)


def split(strategy: str, *, dp: int = 1, pp: int = 1, tp: int = 1, **about: Any) -> Split:
    """A strategy over a layout."""
    return Split(strategy=strategy, layout=ParallelLayout(dp=dp, pp=pp, tp=tp), **about)


def hardware(ranks: int, *, per_host: int = 8, kind: Kind = "cuda", cores: int = 8) -> Hardware:
    """Equal hosts."""
    device = Device(kind=kind, name="round", memory_bytes=2**30, peak_flops=1e9)
    hosts = -(-ranks // per_host)
    here = min(ranks, per_host)
    host = Host(devices=(device,) * here, link=NEAR, cores=cores, memory_bytes=2**33)
    return Hardware(hosts=(host,) * hosts, network=FAR if hosts > 1 else None)


def profile() -> StepProfile:
    """0.1 s forward, 0.2 s backward, 0.03 s update."""
    return StepProfile(forward_s=0.1, backward_s=0.2, update_s=0.03)


def line(operation: str, algorithm: str, alpha_s: float, beta_s_per_byte: float = 0.0) -> Fit:
    """A measured line, without a residual."""
    return Fit(
        operation=operation,
        algorithm=algorithm,
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
        residual=0.0,
    )
