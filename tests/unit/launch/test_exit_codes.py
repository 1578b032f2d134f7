"""From the ranks' exit codes to the launcher's."""

import signal

import pytest

from gradsync.commands.launch.local import after_failure, after_signal, obituary


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([3], 1),
        ([-9], 1),
        ([1, 2], 2),
        ([124], 124),
        ([130, 1], 130),
        ([75, 75], 75),
        ([75, 0], 75),
        ([75, 1], 1),
        ([1, 75], 1),
        ([75, 2], 2),
        ([None, 5], 1),
    ],
)
def test_after_a_failure(codes, code):
    assert after_failure(codes) == code


@pytest.mark.parametrize(
    ("codes", "number", "code"),
    [
        ([0, 0], signal.SIGTERM, 0),
        ([75, 75], signal.SIGTERM, 75),
        ([75, 75], signal.SIGUSR1, 75),
        ([75, -9], signal.SIGTERM, 1),
        ([-15, -15], signal.SIGTERM, 143),
        ([-2, 75], signal.SIGINT, 130),
        ([130, 130], signal.SIGINT, 130),
        ([2, 75], signal.SIGINT, 2),
    ],
)
def test_after_a_signal(codes, number, code):
    assert after_signal(codes, number) == code


def test_what_a_signal_may_mean():
    assert obituary(1, signal.SIGKILL).endswith("SIGKILL (killed by hand, or out of memory)")
    assert "ranks called different collectives" in obituary(1, signal.SIGABRT)
    assert obituary(1, signal.SIGSEGV) == "rank 1 was ended by SIGSEGV"
    assert obituary(1, signal.SIGRTMIN + 3) == "rank 1 was ended by signal 37"
