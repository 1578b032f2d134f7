"""A checkpoint out of a recorded run, and into the beginning of another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.checkpoint.optimizer_state import unpack_optimizer
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.checkpoint.weights import match_weights
from gradsync.comm.base import Communicator
from gradsync.comm.values import broadcast_json, broadcast_tensors
from gradsync.errors import CheckpointError
from gradsync.verify.runner import Parts
from gradsync.verify.trace import Tensors, Trace


@dataclass(frozen=True, slots=True)
class Saved:
    """A run's state after some steps, read back from its files."""

    steps: int
    """Steps done."""
    weights: Tensors
    """Parameters, tied ones once."""
    buffers: Tensors
    """Persistent buffers."""
    optimizer: tuple[Tensors, dict[str, Any]]
    """Packed optimizer state."""
    data: dict[str, Any]
    """The loader's."""
    strategy: str
    """That saved it."""
    extra: Tensors
    """What that strategy itself keeps."""

    def load(self, parts: Parts) -> None:
        """Put it into a run that has not begun, with the calls of a training run that resumes; all
        ranks call it."""
        parts.loader.load_state_dict(self.data)
        weights = match_weights(parts.model, {**self.weights, **self.buffers})
        parts.sync.load_full_weights(weights)
        tensors, description = self.optimizer
        unpack_optimizer(
            parts.optimizer, list(parts.model.named_parameters()), tensors, description
        )
        parts.sync.scatter(parts.optimizer)
        if self.extra and parts.strategy == self.strategy:
            parts.sync.load_state_tensors(self.extra)


def save(directory: Path, strategy: str, trace: Trace, steps: int) -> None:
    """Write what `trace` had after `steps` steps as an ordinary checkpoint."""
    step = trace.steps[steps - 1]
    CheckpointStore(directory).save(
        Snapshot(
            step=steps,
            tensors={
                "weights": step.after,
                "buffers": {name: step.buffers[name] for name in trace.persistent},
                "optimizer": step.state,
                "extra": step.extra,
            },
            state={"optimizer": step.description, "data": step.data, "strategy": strategy},
        )
    )


def read(directory: Path, comm: Communicator) -> Saved:
    """Read it back, checked; rank 0 reads and hands out, as in a training run.

    Raises:
        CheckpointError: nothing good is there.
    """
    header, tensors = None, {}
    if comm.rank == 0:
        store = CheckpointStore(directory)
        info, problems = store.latest()
        if info is None:
            raise CheckpointError("; ".join([f"no checkpoint in {directory.name}", *problems]))
        found = store.load(info.path)
        header, tensors = {"steps": found.step, "state": found.state}, found.tensors
    header = broadcast_json(comm, header)
    weights, buffers, optimizer, extra = (
        broadcast_tensors(comm, tensors.get(part))
        for part in ("weights", "buffers", "optimizer", "extra")
    )
    return Saved(
        steps=header["steps"],
        weights=weights,
        buffers=buffers,
        optimizer=(optimizer, header["state"]["optimizer"]),
        data=header["state"]["data"],
        strategy=header["state"]["strategy"],
        extra=extra,
    )
