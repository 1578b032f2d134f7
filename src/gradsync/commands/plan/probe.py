"""Measures the time of a model's leaf and update on this device.

    clock   ├ forward ┤├ backward: p73, p72, ... p0 ┤├ clip, AdamW ┤     again and again

A hook on every parameter reads the clock when its gradient is ready. The profile has one bucket per
parameter; `step_costs` combines them into any strategy's buckets. On CUDA the clock is events in
the stream, read when the device is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from statistics import median
from typing import Any

import msgspec
import torch
from torch import Tensor

from gradsync.commands.models.gpt import GPT
from gradsync.commands.plan.measured import Cache, Conditions, machine_conditions
from gradsync.commands.plan.profile import BucketReady, StepProfile
from gradsync.commands.plan.workload import Workload
from gradsync.runtime.machine import choose_threads, pin_threads
from gradsync.runtime.memory import keep_freed_memory

CLIP_NORM = 1.0
_WARM_UP, _FEWEST, _MOST = 2, 3, 8
"""Leaves."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

PROFILES = Cache("profiles", lambda document: msgspec.convert(document, StepProfile))


def profile_conditions(work: Workload, threads: int) -> Conditions:
    """Conditions of the profile of `work`; the number of leaves does not matter."""
    return machine_conditions(work.kind, threads) | asdict(replace(work, num_leaves=1))


def probe_profile(work: Workload, *, ranks_per_host: int = 1, budget_s: float = 8.0) -> StepProfile:
    """Measure one rank alone: forward and backward of one leaf, clipping and fused AdamW.

    On a CPU this process keeps freed memory from now on, as the trainer does
    (`runtime.memory.keep_freed_memory`); torch's thread count is restored afterwards.

    Args:
        work: model, leaf, dtype, kind of device; a replica must fit into the device's memory.
        ranks_per_host: ranks that will share the host's cores; sets the threads of each.
        budget_s: seconds to spend; at least three leaves are measured, whatever they take.
    """
    if work.kind == "cpu":
        keep_freed_memory()
    before = pin_threads(choose_threads(ranks_per_host))
    try:
        return _measure(work, torch.device(work.kind), budget_s)
    finally:
        pin_threads(before)


def _measure(work: Workload, device: torch.device, budget_s: float) -> StepProfile:
    model = GPT(
        work.model,
        seed=0,
        activation_checkpointing=work.activation_checkpointing,
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shape = (2, work.micro_batch_size, work.seq_len)
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randint(work.model.vocab_size, shape, generator=generator).to(device)
    on_cuda = device.type == "cuda"
    now: Callable[[], Any] = _cuda_event if on_cuda else time.perf_counter
    found: list[dict[str | int, Any]] = []  # Times of each leaf and update; of gradients by number

    def mark(number: int, _: Tensor) -> None:
        found[-1][number] = now()

    for number, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(partial(mark, number))

    def step() -> None:
        found.append({"begin": now()})
        dtype = _DTYPES.get(work.dtype)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            loss = model(*leaf) / leaf[0].numel()
        found[-1]["forward"] = now()
        loss.backward()
        found[-1]["backward"] = now()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found[-1]["update"] = now()

    def steps(count: int) -> None:
        found.clear()
        for _ in range(count):
            step()
        if on_cuda:
            torch.cuda.synchronize()

    steps(_WARM_UP)
    one_s = _between(found[-1]["begin"], found[-1]["update"])
    steps(max(_FEWEST, min(_MOST, int(budget_s / one_s))))

    def median_s(first: str | int, last: str | int) -> float:
        return median(_between(marks[first], marks[last]) for marks in found)

    backward_s = median_s("forward", "backward")
    sizes = [parameter.numel() * parameter.element_size() for parameter in model.parameters()]
    ready = [min(backward_s, median_s("forward", number)) for number in range(len(sizes))]
    return StepProfile(
        forward_s=median_s("begin", "forward"),
        backward_s=backward_s,
        update_s=median_s("backward", "update"),
        buckets=tuple(
            BucketReady(num_bytes=sizes[number], ready_s=ready[number])
            for number in sorted(range(len(sizes)), key=ready.__getitem__)
        ),
        measured=True,
    )


def _cuda_event() -> torch.cuda.Event:
    """The time at which the stream reaches this point."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, last: Any) -> float:
    """Seconds between two clock readings."""
    return last - first if isinstance(first, float) else first.elapsed_time(last) / 1000
