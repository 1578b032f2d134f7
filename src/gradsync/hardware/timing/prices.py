"""What messages cost between the ranks of a split: by measured lines, else by formula; pure."""

from __future__ import annotations

from collections.abc import Sequence

from gradsync.hardware.description import Hardware
from gradsync.hardware.timing.alpha_beta import Fit
from gradsync.hardware.timing.collective_cost import Place, all_reduce_s, half_s
from gradsync.hardware.timing.traffic import Traffic
from gradsync.hardware.workload import Split

COPY = "copy"
"""Operation and algorithm of the line through a plain copy's times."""
OWN_ALGORITHMS = {
    "ring": "ring",
    "doubling": "recursive_doubling",
    "hierarchical": "hierarchical",
}
"""Those that are made of messages on one host too: in `collective_cost`, and in lines."""


class Prices:
    """Made for one split on one hardware.

    Args:
        hardware: of exactly the devices that are used; ranks fill its hosts in order.
        split: its layout says which ranks talk.
        traffic: of its strategy.
        fits: measured here for as many ranks as there are replicas, on one host.
    """

    def __init__(
        self, hardware: Hardware, split: Split, traffic: Traffic, fits: Sequence[Fit] = ()
    ) -> None:
        layout, host = split.layout, hardware.hosts[0]
        on_host = len(hardware.hosts) == 1
        local = min(len(host.devices), layout.world_size)
        per_host = max(local // layout.model_ranks, 1)
        self.data = Place(
            ranks=layout.dp,
            per_host=per_host,
            link=host.link,
            network=hardware.network,
            groups_per_host=max(local // per_host, 1),
        )
        self.shards = Place(
            ranks=layout.tp,
            per_host=min(layout.tp, local),
            link=host.link,
            network=hardware.network,
        )
        self._stages_far = layout.model_ranks > local
        on_cpu = host.devices[0].kind == "cpu"
        self.hides = not (on_cpu and on_host)
        """On one host's CPU the cores that would communicate beside backward are computing it."""
        self.divided = (
            on_cpu and on_host and traffic.through_host and layout.model_ranks == 1 < layout.dp
        )
        """Whether the ranks of a host add up and update in shares, through shared memory."""
        self._memory_bytes_per_s = host.devices[0].memory_bytes_per_s
        self._by_library = traffic.by_library
        # Gloo's all_reduce is a ring, whatever the size; NCCL chooses.
        self._gloo = on_cpu and traffic.algorithm == "best"
        self._algorithm = traffic.algorithm
        self._fits = {(f.operation, f.algorithm): f for f in fits if on_host and layout.dp > 1}

    def all_reduce_s(self, num_bytes: float) -> float:
        """Among replicas."""
        fit = self._measured("all_reduce")
        if fit is not None:
            return fit.seconds(num_bytes)
        return all_reduce_s(self.data, num_bytes, "ring" if self._gloo else self._algorithm)

    def scatter_s(self, num_bytes: float) -> float:
        """reduce_scatter among replicas, over `num_bytes` of the whole tensor."""
        return self._half_s("reduce_scatter", num_bytes)

    def gather_s(self, num_bytes: float) -> float:
        """all_gather among replicas, over `num_bytes` of the whole tensor."""
        return self._half_s("all_gather", num_bytes)

    def tensor_s(self, num_bytes: float) -> float:
        """all_reduce among tensor shards."""
        return all_reduce_s(self.shards, num_bytes)

    def hop_s(self, num_bytes: float) -> float:
        """From stage to stage."""
        return self.data.seconds(num_bytes, far=self._stages_far)

    def copy_s(self, num_bytes: float) -> float:
        """From memory to memory of one rank, while all do so; 0 where nobody knows."""
        fit = self._fits.get((COPY, COPY))
        if fit is not None:
            return fit.seconds(num_bytes)
        rate = self._memory_bytes_per_s
        return 0.0 if rate is None else 2 * num_bytes / rate  # read, and written

    def _half_s(self, operation: str, num_bytes: float) -> float:
        fit = self._measured(operation)
        return half_s(self.data, num_bytes) if fit is None else fit.seconds(num_bytes)

    def _measured(self, operation: str) -> Fit | None:
        """The line of whatever carries this strategy's messages on a host."""
        if self._by_library:
            return self._fits.get((operation, "backend"))
        ways = (OWN_ALGORITHMS.get(self._algorithm, "shared"), "shared_copies", "backend")
        found = (self._fits.get((operation, way)) for way in ways)
        return next((fit for fit in found if fit is not None), None)
