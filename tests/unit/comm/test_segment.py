"""Memory without a name, for which another's is never taken."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from gradsync.comm.shared_memory.segment import Segment, open_segment


def test_a_peer_sees_the_same_memory() -> None:
    segment = Segment(4096)
    assert not segment.memory.any()
    peer = open_segment(segment.address, 4096)
    segment.memory[100] = 7
    peer[4095] = 9
    assert (int(peer[100]), int(segment.memory[4095])) == (7, 9)
    segment.close_door()
    assert int(peer[100]) == 7
    with pytest.raises(OSError):  # the door is closed
        open_segment(segment.address, 4096)


def test_another_segment_under_the_same_numbers_is_refused() -> None:
    """As on another host, where a process with this number has a segment of its own."""
    first, second = Segment(4096), Segment(4096)
    swapped = second.address._replace(token=first.address.token)
    with pytest.raises(OSError, match="another segment"):
        open_segment(swapped, 4096)
    with pytest.raises(OSError, match="another file"):
        open_segment(first.address, 8192)
    for segment in (first, second):
        segment.close_door()


def test_too_little_memory_is_an_error_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="no memory"):
        Segment(4096)
    assert os.listdir("/proc/self/fd") == before


def test_memory_lives_as_long_as_its_tensor() -> None:
    segment = Segment(8192)
    part = segment.memory.view(torch.float32)[10:20]
    segment.close_door()
    del segment
    part.fill_(3.0)
    assert float(part.sum()) == 30.0
