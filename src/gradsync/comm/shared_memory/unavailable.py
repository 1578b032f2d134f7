"""Reasons why ranks cannot share memory; each has a number, since ranks exchange them."""

from __future__ import annotations

from enum import IntEnum

from gradsync.errors import RunError


class SharedMemoryError(RunError):
    """The ranks cannot share memory; raised on all of them."""


class Reason(IntEnum):
    """One rank's result; the greatest one over all ranks is reported."""

    NONE = 0
    NO_PEER = 1
    NO_MEMFD = 2
    NO_PIDFD = 3
    NO_MEMORY = 4
    MEMORY_ORDER = 5
    NOT_LINUX = 6


MESSAGES = {
    Reason.NO_PEER: "the ranks are not on one host, or not in one container (they cannot see each "
    "other in /proc)",
    Reason.NO_MEMFD: "the kernel does not allow memfd_create; a container's seccomp profile may "
    "forbid it",
    Reason.NO_PIDFD: "a rank could not notice that another one has died: the kernel is older than "
    "5.3, or a container's seccomp profile forbids pidfd_open",
    Reason.NO_MEMORY: "there is too little free memory for the shared buffers: stop other "
    "processes, raise the container's memory limit, or use fewer ranks per host",
    Reason.MEMORY_ORDER: "only x86-64 processors keep the order of writes that it relies on",
    Reason.NOT_LINUX: "it needs Linux",
}
