"""Which tests go to one worker."""

import pytest

from support.scheduling import piece_of


@pytest.mark.parametrize(
    ("nodeid", "piece"),
    [
        ("tests/unit/test_cli.py::test_a[b::c/d]", "tests/unit/test_cli.py::test_a[b::c/d]"),
        ("tests/processes/test_fsdp.py::test_a[1]", "tests/processes/test_fsdp.py"),
        ("tests/unit/test_support_leaks.py::test_a", "tests/unit/test_support_leaks.py"),
        ("tests/gpu/test_model_gpu.py::test_a", "gpu"),
    ],
)
def test_pieces(nodeid: str, piece: str) -> None:
    assert piece_of(nodeid) == piece


def test_pytest_xdist_asks_for_it(pytestconfig: pytest.Config) -> None:
    """A hook of another name would be ignored."""
    asked = pytestconfig.hook.pytest_xdist_make_scheduler.get_hookimpls()
    assert asked[-1].plugin_name.endswith("tests/conftest.py")  # the last one is the first to go
