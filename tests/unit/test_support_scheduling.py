"""Which tests go to one worker."""

from collections import OrderedDict

from support.scheduling import Tiers


def test_an_ended_worker_leaves_only_what_is_undone() -> None:
    """Given out again, a finished piece stops the run for good, the test ends the next worker."""
    tiers, ended = object.__new__(Tiers), object()
    tiers.workqueue = OrderedDict()
    pieces = {"done": {"a": True}, "half": {"b": True, "c": False, "d": False}}
    tiers.assigned_work = {ended: pieces}
    assert tiers.remove_node(ended) == "c"
    assert tiers.workqueue == {"half": {"b": True, "c": True, "d": False}}
    assert not tiers.assigned_work
