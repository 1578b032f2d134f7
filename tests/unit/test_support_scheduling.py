"""Which tests go to one worker."""

from collections import OrderedDict

import pytest

from support.scheduling import Tiers, piece_of


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


def test_an_ended_worker_leaves_only_what_is_undone() -> None:
    """Given out again, a finished piece stops the run for good, the test ends the next worker."""
    tiers, ended = object.__new__(Tiers), object()
    tiers.workqueue = OrderedDict()
    pieces = {"done": {"a": True}, "half": {"b": True, "c": False, "d": False}}
    tiers.assigned_work = {ended: pieces}
    assert tiers.remove_node(ended) == "c"
    assert tiers.workqueue == {"half": {"b": True, "c": True, "d": False}}
    assert not tiers.assigned_work


def test_pytest_xdist_asks_for_it(pytestconfig: pytest.Config) -> None:
    """A hook of another name would be ignored."""
    asked = pytestconfig.hook.pytest_xdist_make_scheduler.get_hookimpls()
    assert asked[-1].plugin_name.endswith("tests/conftest.py")  # the last one is the first to go
