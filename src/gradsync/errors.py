"""The exception tree. Everything gradsync raises on purpose derives from `GradsyncError`.

    GradsyncError
    ├── UsageError(ValueError)         exit code 2: the request cannot be right
    │   ├── ConfigError                  unknown or ill-typed key, impossible batch arithmetic
    │   ├── LaunchError                  launcher variables missing, half set or contradicting
    │   └── DataError                    data missing, empty, truncated or not what it claims to be
    └── RunError(RuntimeError)         exit code 1: the request was right, the run failed
        ├── RendezvousError              ranks did not find each other in time
        ├── CheckpointError              a checkpoint is corrupt or of another run
        ├── DivergenceError              loss, gradients or weights became nan or inf
        ├── DriftError                   replicas hold different bits
        ├── LostPeerError                another rank's process is dead, or does not answer
        │   └── LatePeerError              exit code 124: it lives, but did not arrive in time
        └── PeerError                    another rank failed; carries that rank's traceback

A message states what happened, on which rank, the actual and expected values, and what to do.
Catch broadly (`GradsyncError`), recover narrowly.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class GradsyncError(Exception):
    """Base of every error gradsync raises on purpose. `exit_code` is the command's exit code."""

    exit_code = 1


class UsageError(GradsyncError, ValueError):
    """The request cannot be right as given; nothing was started or written."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key or value that cannot be used."""


class LaunchError(UsageError):
    """Launcher variables are half set or contradict each other."""


class DataError(UsageError):
    """A data set is missing, empty, truncated or not what its metadata says."""


class RunError(GradsyncError, RuntimeError):
    """The run itself failed."""


class RendezvousError(RunError):
    """The ranks did not find each other within the timeout."""


class CheckpointError(RunError):
    """A checkpoint cannot be read, or cannot be loaded into this run."""


class DivergenceError(RunError):
    """The loss, the gradients or the weights became nan or inf; raised on all ranks."""


class DriftError(RunError):
    """Replicas hold different bits; raised on all ranks that compared them, and names a tensor
    and the ranks. `sides`: the ranks that hold the same bits as each other."""

    sides: Collection[Sequence[int]] = ()


class LostPeerError(RunError):
    """Another rank has ended, or does not answer."""


class LatePeerError(LostPeerError):
    """Another rank lives but did not reach a collective in time."""

    exit_code = 124


class PeerError(RunError):
    """Another rank failed.

    Args:
        message: one line naming the rank.
        rank: the rank that failed first; -1 if ranks vanished without a word.
        traceback_text: that rank's traceback, as text; "" if its one line suffices.
        exit_code: that rank's exit code.
        host: that rank's host, or those of vanished ranks, with commas; "" if unknown.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        traceback_text: str = "",
        exit_code: int = 1,
        host: str = "",
    ) -> None:
        super().__init__(message)
        self.host = host
        self.rank = rank
        self.traceback_text = traceback_text
        self.exit_code = exit_code
