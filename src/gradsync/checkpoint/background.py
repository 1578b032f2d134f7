"""Writes checkpoints while training goes on: a step waits for a copy of its tensors only.

    main thread   step 50 ─ copy ─ step 51 ── step 52 ── ... ── step 100 ─ copy ─ ...
    writer                     └─ hash, write, sync, rename ─┘          └─ ...

The copy is made between two steps, so it holds the weights of one finished step, whatever the next
steps do to them. There is one write at a time: the next save waits for the last one.
"""

from __future__ import annotations

import atexit
import copy
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gradsync.checkpoint.pieces import InOrder
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.checkpoint.tensor_file import alias_key

_log = logging.getLogger("gradsync")


class BackgroundWriter:
    """Saves snapshots to `store` on a thread; used by one thread, on the rank that writes.

    The copies are kept for the next save: memory for one more model and its optimizer, on the CPU
    (pinned if the tensors are on a GPU). Files that arrive from other ranks during the write are
    written at once, in the calling thread.
    """

    def __init__(self, store: CheckpointStore) -> None:
        self.store = store
        self._copies: dict[tuple[str, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._unsaid: list[BaseException] = []  # outlives this object

    def save(self, snapshot: Snapshot, *, owned: bool = False) -> None:
        """Copy the snapshot and start to write it, once the last one is written. If it is
        `owned`, the caller keeps no reference to its tensors, and those on the CPU are not copied.

        Raises:
            CheckpointError: the last one, or this one if it is written at once, could not be
                written.
        """
        self.wait()
        wait_for_writes(self.store.directory)  # of another object
        if isinstance(snapshot.tensors, InOrder):
            self.store.save(snapshot)
            return
        copied = {n: self._copy(n, part, owned=owned) for n, part in snapshot.tensors.items()}
        if any(t.is_cuda for tensors in snapshot.tensors.values() for t in tensors.values()):
            torch.cuda.current_stream().synchronize()
        state = snapshot.state if owned else copy.deepcopy(snapshot.state)
        kept = replace(snapshot, tensors=copied, state=state)
        # Not a daemon: a program that ends here has the checkpoint written.
        name = f"gradsync-checkpoint {os.path.realpath(self.store.directory)}"
        self._thread = threading.Thread(target=self._write, args=(kept,), name=name, daemon=False)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of a write that has ended; does not wait."""
        if self._unsaid:
            raise self._unsaid.pop()

    def wait(self) -> None:
        """Wait until nothing is being written, then `check`."""
        if self._thread is not None:
            self._thread.join()
        self.check()

    def _copy(self, stem: str, tensors: Mapping[str, Tensor], *, owned: bool) -> dict[str, Tensor]:
        """Copies on the CPU; tensors of the same memory share one."""
        made: dict[tuple[object, ...], Tensor] = {}
        found = {}
        for name, tensor in tensors.items():
            if tensor.is_meta or tensor.layout != torch.strided or (owned and tensor.is_cpu):
                found[name] = tensor  # the first two are refused by name in the write
                continue
            if alias_key(tensor) not in made:
                here = self._copies.get((stem, name))
                if here is None or (here.shape, here.dtype) != (tensor.shape, tensor.dtype):
                    here = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._copies[stem, name] = here
                made[alias_key(tensor)] = here.copy_(tensor.detach(), non_blocking=True)
            found[name] = made[alias_key(tensor)]
        return found

    def _write(self, snapshot: Snapshot) -> None:
        try:
            self.store.save(snapshot)
        except BaseException as error:  # raised again in the thread that trains
            self._unsaid.append(error)
            atexit.register(_fail_if, self._unsaid)
            _log.warning("%s", error)


def wait_for_writes(folder: Path) -> None:
    """Wait until no thread of this process writes to `folder`, or to the one it is in."""
    name = f"gradsync-checkpoint {os.path.realpath(folder)}/"
    for thread in threading.enumerate():
        if name.startswith(f"{thread.name}/"):
            thread.join()


def _fail_if(unsaid: list[BaseException]) -> None:
    """Give a program that is over, whatever its exit code, that of a write's error not raised."""
    if not unsaid:
        return
    sys.stdout.flush()
    os._exit(getattr(unsaid[0], "exit_code", 1))
