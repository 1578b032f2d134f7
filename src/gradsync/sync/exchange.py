"""Sums of full buckets over all ranks, into `bucket.flat(0)`, while other buckets fill.

Contains the exchanges that use a communicator's collectives or messages in rounds. For sums along
the tree see tree_exchange.py, for sums in memory that ranks share ownership/host_step.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator, Work
from gradsync.comm.process_group import Background, Done, ProcessGroupCommunicator, Then
from gradsync.sync.buckets import Bucket, Sums

if TYPE_CHECKING:
    from torch import Tensor


class Exchange:
    """A way to sum buckets; all ranks launch the same buckets in the same order."""

    def begin(self, sums: Sums) -> None:
        """Called once per step, before the first launch, when this rank's part is counted."""

    def launch(self, bucket: Bucket) -> Work:
        """Start; after `wait`, `bucket.flat(0)` holds the sum (or this rank's shard of it)."""
        raise NotImplementedError

    def launch_half(self, bucket: Bucket) -> Work:
        """Start the half that gives each rank a shard of the sum; for shards `by_halves`."""
        raise NotImplementedError

    def close(self) -> None:
        """Release threads and memory."""


class AllReduce(Exchange):
    """The communicator's own all_reduce: whole group, the bucket's [numel] and dtype; overlaps
    backward."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def launch(self, bucket: Bucket) -> Work:
        return self._comm.all_reduce(bucket.flat(0))


class Algorithm(Exchange):
    """One of gradsync's all-reduces, by messages in rounds, on a thread while backward runs."""

    def __init__(
        self,
        all_reduce: Callable[[Tensor], None],
        device: torch.device,
        made: Sequence[ProcessGroupCommunicator],
    ) -> None:
        self._all_reduce, self._made = all_reduce, made
        self._background = Background(device)

    def launch(self, bucket: Bucket) -> Work:
        flat = bucket.flat(0)
        return self._background.submit(lambda: self._all_reduce(flat))

    def close(self) -> None:
        """End the thread, then the groups it used."""
        for each in (self._background, *self._made):
            each.close()


class ReduceScatter(Exchange):
    """Reduce-scatter: each rank gets its shard's sum, in place in `flat(0)`; half the bytes.

    Whole group, the bucket's [numel] and dtype in, [numel / W] out; overlaps backward.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def launch(self, bucket: Bucket) -> Work:
        flat = bucket.flat(0)
        mine = bucket.plan.shard(self._comm.rank, self._comm.world_size)
        shard = flat[mine.start : mine.stop]
        # Not into `shard` itself: backends may refuse to read and write the same memory.
        result = torch.empty_like(shard)
        return Then(self._comm.reduce_scatter(result, flat), lambda: shard.copy_(result))


class HalfWire(Exchange):
    """All-reduce in 16 bits: half the bytes; rounds when sending and at every addition.

    [Note: fp16 on the wire] Gradients here are sums over targets and would exceed 65,504, fp16's
    largest number. So a bucket is first multiplied by the power of two that brings ranks x largest
    magnitude just below 65,504; a power of two rounds nothing. Ranks agree on that magnitude by one
    all-reduce (max, fp32 [1]). On a CPU backward waits for it; on CUDA only a separate stream does.
    bf16 has fp32's range.

    Complex numbers are sent as pairs of real numbers, because there is no complex bf16.
    """

    def __init__(self, comm: Communicator, dtype: torch.dtype) -> None:
        self._comm = comm
        self._dtype = dtype
        self._stream: Any = None

    def launch(self, bucket: Bucket) -> Work:
        device = bucket.flat(0).device
        if device.type != "cuda":
            return self._launch(bucket)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # After this bucket's gradients, and after the last use of what this stream has allocated.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            return self._launch(bucket)

    def _launch(self, bucket: Bucket) -> Work:
        flat = bucket.flat(0)
        if self._comm.world_size == 1:
            return Done()  # nothing is sent, nothing is rounded
        if flat.is_complex():
            flat = torch.view_as_real(flat)  # [numel, 2], the same memory
        if self._dtype == torch.bfloat16:
            small = flat.to(self._dtype)  # whole group, bf16 [numel], overlaps backward
            return Then(self._comm.all_reduce(small), lambda: flat.copy_(small))
        scale = self._scale(flat)
        small = (flat.float() * scale).to(self._dtype)
        # Whole group, fp16 [numel], overlaps backward.
        return Then(self._comm.all_reduce(small), lambda: flat.copy_(small.float() / scale))

    def _scale(self, flat: Tensor) -> Tensor:
        """Power of two, [1]; 1 if the gradient is all zeros or not finite."""
        largest = flat.abs().max().reshape(1).float()  # 16 bits would round the scale up
        self._comm.all_reduce(largest, "max").wait()  # see [Note: fp16 on the wire]
        limit = torch.finfo(torch.float16).max / self._comm.world_size
        scale = torch.exp2(torch.floor(torch.log2(limit / largest)).clamp(-120, 120))
        return torch.where(torch.isfinite(largest) & (largest > 0), scale, torch.ones_like(scale))
