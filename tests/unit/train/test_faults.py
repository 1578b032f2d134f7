"""A fault's plan, and the lines that name it."""

from __future__ import annotations

import pytest

from gradsync.commands.train.faults import FAULTS, PHASES, FaultPlan, named
from gradsync.errors import ConfigError
from support import more_faults


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "quake"}, r"unknown fault 'quake' \(there are: kill, stop, raise, nan, "),
        ({"kind": "nan", "phase": "data"}, "nan can come in backward; got 'data'"),
        ({"step": 0}, "step counts from 1 on"),
        ({"rank": -1}, "its rank from 0"),
        ({"phase": "save"}, "rank 0 writes the checkpoints"),
        ({"kind": "disk-full"}, "rank 0 writes the checkpoints"),
    ],
)
def test_a_plan_that_cannot_come(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FaultPlan(**{"kind": "kill", "rank": 1, "step": 3, **values})  # type: ignore[arg-type]


def test_each_kind_has_moments_of_its_own() -> None:
    assert more_faults.FLAGS.keys() < FAULTS.keys()
    for kind, fault in FAULTS.items():
        assert set(fault.phases) <= set(PHASES)
        plan = FaultPlan(kind=kind, rank=0, step=1)
        assert plan.moment == fault.phases[0]


FIRST = "gradsync: error: [rank 0] rank 2 on node-a failed first: "
CALL = "all_reduce (sum, backend) of float32 [4] on cpu named 'loss'"
OTHER = "different operations at the same time: "


@pytest.mark.parametrize(
    ("kind", "line", "ranks"),
    [
        ("kill", "gradsync: error: rank(s) 2 vanished without a word (killed, …)", {2}),
        ("kill", "gradsync: error: rank 2 was ended by SIGKILL (killed by hand, …)", {2}),
        ("kill", "rank 0, which serves the rendezvous store, vanished without a word (…)", {0}),
        ("kill", "rank(s) 0, 2 on node-b vanished without a word", {0, 2}),
        ("kill", FIRST + "ValueError", None),
        ("stop", "rank 2 (process 4711) gives no sign of life (it is stopped, by a …)", {2}),
        ("stop", "rank 2 (process 4711) gives no sign of life (something holds …)", None),
        ("partition", "rank 2 (process 4711) gives no sign of life (something holds …)", {2}),
        ("busy", "rank 2 (process 4711) is in support/more_faults.py:9 _spin; ranks 0", {2}),
        ("raise", FIRST + "ValueError: a fault of gradsync drill", {2}),
        (
            "oom",
            FIRST + "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate mem",
            None,
        ),
        ("oom", FIRST + "RuntimeError: DefaultCPUAllocator: can't allocate memory: you", {2}),
        ("nan", "WARNING: rank 2, step 3: nan or inf in this rank's gradient of norm", {2}),
        ("skip-collective", f"{OTHER}this rank x, rank(s) 2 something else (…)", {2}),
        ("extra-collective", f"{OTHER}this rank x, rank(s) 0, 1 something else (…)", {0, 1}),
        ("shape", f"{OTHER}rank 0, 1: {CALL}; rank 2: {CALL} (all ranks must", {2}),
        ("swap", f"{OTHER}rank 0: {CALL}; rank 1, 2: {CALL} (all ranks must", {0}),
        ("dtype", f"{OTHER}rank 0: {CALL}; rank 1: {CALL} (all ranks must", {0, 1}),
        ("drop-leaf", FIRST + "step 3 brought 3 of its 4 micro-batches on this rank: no", {2}),
        ("drop-leaf", FIRST + "micro-batch 7 came where micro-batch 6 was due: a rank's", {2}),
        (
            "flip-bit",
            "replicas differ, first in 'x.2': rank 2 holds other bits than ranks 0,1",
            {2},
        ),
        ("flip-bit", "replicas differ, first in 'x': rank 0 / rank 1 hold different bits", {0, 1}),
        ("disk-full", "rank 0 on node-a failed first: cannot write x: No space left on", {0}),
        ("disk-full", "gradsync: error: cannot write x: No space left on device; the last", set()),
        ("sigterm", "stopped by a signal to another rank after step 3; checkpoint", set()),
    ],
)
def test_who_is_named(kind: str, line: str, ranks: set[int] | None) -> None:
    assert named(FAULTS[kind], line) == ranks
