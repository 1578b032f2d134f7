"""`ddp`: torch's own DistributedDataParallel, the reference; `powersgd`: the same with a hook.

Buckets of `bucket_mb` are all-reduced while backward still runs (Li et al. 2020, arXiv 2006.15704):

    backward   ──[layer n]──[layer n-1]── … ──[layer 1]─┐
    all_reduce        ──[bucket 0]──[bucket 1]── … ──[last]── optimizer

DDP must know *before the forward* whether the next backward synchronises. If the flag is set
between forward and backward, DDP ignores it and replicas silently drift apart. Hence `micro_step`.

PowerSGD sends gradients whole until `start_powerSGD_iter`, and in a step in which some rank has no
micro-batch. A step of the second kind affects neither error nor count. Replicas stay equal;
gradients are approximations.

[Note: The error's unit] Gradients here are sums over a rank's share, and so is the error. DDP
turns their mean back into a sum over ranks, and the step divides by its own weight. So an error
counts with the weight of the step that adds it. With the same number of targets in each step
this is exactly the paper's algorithm.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import torch

from gradsync.comm.base import Communicator
from gradsync.comm.process_group import refuse_detail
from gradsync.core.torch_private import DDP_WITHOUT_BUFFER_SYNC, regroup_ddp_buckets
from gradsync.errors import ConfigError
from gradsync.sync.options import DdpOptions, PowerSgdOptions
from gradsync.sync.reducer import Reducer, outside_of_micro_step, sum_gradients
from gradsync.sync.watch import Stopwatch

if TYPE_CHECKING:
    from torch import nn


class TorchDdpReducer(Reducer):
    """Adapter around `torch.nn.parallel.DistributedDataParallel`; for all other code (names,
    checkpoints) the model stays unwrapped.

    Args:
        model: on its device already.
        comm: must be a process-group communicator.
        options: of DDP; those of PowerSGD add its hook.
    """

    waits_in_backward = needs_micro_step = True

    def __init__(self, model: nn.Module, comm: Communicator, options: DdpOptions) -> None:
        if not any(parameter.is_cuda for parameter in model.parameters()):
            refuse_detail("torch's DDP crashes under it on a CPU")
        compresses = isinstance(options, PowerSgdOptions)
        super().__init__(model, comm, strategy="powersgd" if compresses else "ddp")
        self.ddp = torch.nn.parallel.DistributedDataParallel(
            model,
            process_group=getattr(comm, "group"),  # noqa: B009  no part of `Communicator`
            bucket_cap_mb=options.bucket_mb,
            gradient_as_bucket_view=True,
            # DDP would broadcast buffers in some forwards. Ranks with different numbers of
            # micro-batches make different numbers of forwards, and would wait indefinitely.
            **DDP_WITHOUT_BUFFER_SYNC,
            find_unused_parameters=options.find_unused_parameters,
        )
        self.hook = None
        if compresses:
            from gradsync.sync.comm_hook import CommHook, PowerSgd

            ddps = {each.name for each in fields(DdpOptions)}
            own = {name: value for name, value in asdict(options).items() if name not in ddps}
            self.hook = PowerSgd(**own)
            self.shards.takes_scaler = False  # inf would stay in the hook's error
            CommHook(None, self.hook).register(self.ddp)
        self._called: Any = torch.compile(self.ddp) if options.compile_wrapper else self.ddp
        self._in_micro_step = False
        self._synchronised = self._regrouped = False
        self._forwards = 0
        # The last ready gradient marks the end of this rank's own work; the time that backward
        # still waits after it is exposed communication.
        self._watch = watch = Stopwatch(on_cuda=any(p.is_cuda for p in self.parameters))
        for parameter in self.parameters:  # hooks must not hold `self`, which holds the parameters
            parameter.register_post_accumulate_grad_hook(lambda _: watch.start())

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the model through DDP, and count the call, to detect forwards that bypass it.

        Raises if gradients are recorded and no `micro_step` is active: DDP would synchronise in
        every backward, and hang as soon as ranks have different numbers of micro-batches.
        """
        if torch.is_grad_enabled() and not self._in_micro_step:
            raise ConfigError(outside_of_micro_step(self.strategy))
        self._forwards += 1
        return self._called(*inputs, **named)

    def prime(self, forward_backward: Callable[[], None]) -> None:
        """Run one backward; DDP then regroups its buckets in the order of readiness."""
        with self.micro_step(last=True):
            forward_backward()
        regroup_ddp_buckets(self.ddp)
        self._synchronised, self._regrouped = False, True
        if self.hook is not None:
            self.hook.state.iter = 0  # the throwaway step does not count
        for parameter in self.parameters:
            parameter.grad = None

    @contextmanager
    def micro_step(self, *, last: bool) -> Generator[None]:
        """Synchronise in this backward, or (`no_sync`, forward included) only accumulate."""
        before = self._forwards
        self._in_micro_step = True
        try:
            if last:
                yield
                self._synchronised = True
                self._watch.stop()
            else:
                with self.ddp.no_sync():
                    yield
        finally:
            self._in_micro_step = False
        if self._forwards == before:
            raise ConfigError(
                f"strategy={self.strategy!r}: the forward did not go through `sync.forward(...)`, "
                "so torch DDP could not synchronise; call it in place of the model"
            )

    def reduce(self, used: list[bool], divisor: float | None) -> Stopwatch:
        """See `Reducer.reduce`. Backward has summed already, unless no micro-step was the last one
        on all ranks.

        This happens in a step in which some rank has no micro-batch. DDP cannot take part without
        a backward, so all ranks sum after backward, as `naive` does.
        """
        averaged, self._synchronised = self._synchronised, False
        if averaged:
            if not self._regrouped:
                # DDP itself regroups with a broadcast, in the forward after its first synchronised
                # backward. A rank without a micro-batch then makes none, and the others would wait.
                self._regrouped = True
                regroup_ddp_buckets(self.ddp)
            watch = copy.copy(self._watch)
        else:
            watch = sum_gradients(self.parameters, used, self.comm)
        # DDP has already divided by the number of ranks.
        self.shards.scale(divisor and (self.comm.world_size if averaged else 1) / divisor)
        return watch
