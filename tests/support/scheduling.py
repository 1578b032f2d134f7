"""Which tests pytest-xdist gives to one worker, in which order.

One by one, in the order of collection, but for files whose tests share something that is made
once a worker: a warm pool's answers, a device, what one of them leaks on purpose. (Marks of
`xdist_group` would say it in the tests; under pytest 9.2 pytest-xdist 3.8 does not see them.)
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WHOLE_FOLDERS = ("processes",)
"""Each file of these is one piece of work."""
WHOLE_FILES = ("test_support_leaks.py", "test_slurm_cluster.py", "test_submit_slurm.py")
ONE_AT_A_TIME = ("gpu",)
"""All files of these are one piece of work."""


class Tiers(LoadScopeScheduling):
    """Pieces of work in the order in which tests were collected: cheap tiers first."""

    def schedule(self) -> None:
        """Hand out; never the largest pieces first."""
        self.config.option.loadscopereorder = False
        super().schedule()

    def remove_node(self, node: WorkerController) -> str | None:
        """Hand out again what an ended worker had left, but for the test that it ended in.

        A piece with nothing left in it would keep the next worker waiting for ever (pytest-xdist
        3.8), and a test that ends its worker would end the next one too.
        """
        work = self.assigned_work[node]
        ended_in = next((name for unit in work.values() for name in unit if not unit[name]), None)
        for piece, unit in list(work.items()):
            if ended_in in unit:
                unit[ended_in] = True
            if all(unit.values()):
                del work[piece]
        super().remove_node(node)
        return ended_in

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)


def piece_of(nodeid: str) -> str:
    """The piece of work that a test belongs to."""
    path = PurePosixPath(nodeid.partition("::")[0])
    folder = path.parent.name
    if folder in ONE_AT_A_TIME:
        return folder
    return str(path) if folder in WHOLE_FOLDERS or path.name in WHOLE_FILES else nodeid
