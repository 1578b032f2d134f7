"""Ranks that share one CUDA device: their tensors travel through host memory, over gloo."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gradsync.comm.base import Communicator, Messages, ReduceOp, Work
from gradsync.comm.process_group import AllOf, Done, Then


class ThroughHost:
    """A `Communicator` over `comm` that also takes CUDA tensors. NCCL refuses two ranks on one
    device; gloo's messages read host memory only."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.all_reduce`."""
        there = tensor.cpu()
        work = self.comm.all_reduce(there, op)
        return work if there is tensor else Then(work, partial(tensor.copy_, there))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Work:
        """See `Communicator.broadcast`."""
        there = tensor.cpu()
        work = self.comm.broadcast(there, src)
        return work if there is tensor else Then(work, partial(tensor.copy_, there))

    def all_gather(self, output: Tensor, tensor: Tensor) -> Work:
        """See `Communicator.all_gather`."""
        there = output.cpu()
        work = self.comm.all_gather(there, tensor.cpu())
        return work if there is output else Then(work, partial(output.copy_, there))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """See `Communicator.reduce_scatter`."""
        there = output.cpu()
        work = self.comm.reduce_scatter(there, tensor.cpu(), op)
        return work if there is output else Then(work, partial(output.copy_, there))

    def barrier(self) -> None:
        """See `Communicator.barrier`."""
        self.comm.barrier()

    def exchange(self, sends: Messages, receives: Messages, channel: int = 0, /) -> Work:
        """See `Messenger.exchange`."""
        there = [torch.empty_like(tensor, device="cpu") for tensor, _ in receives]
        arriving = [(t, peer) for t, (_, peer) in zip(there, receives, strict=True)]
        work = self.comm.exchange([(t.cpu(), peer) for t, peer in sends], arriving, channel)
        copies = [
            Then(Done(), partial(home.copy_, t))
            for t, (home, _) in zip(there, receives, strict=True)
        ]
        return AllOf([work, *copies])
