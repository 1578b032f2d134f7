"""Which tests pytest-xdist gives to one worker, in which order.

One by one, in the order of collection, but for files whose tests share something that is made
once a worker: a warm pool's answers, a device, what one of them leaks on purpose. (Marks of
`xdist_group` would say it in the tests; under pytest 9.2 pytest-xdist 3.8 does not see them.)
"""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

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

    def _split_scope(self, nodeid: str) -> str:
        return piece_of(nodeid)


def piece_of(nodeid: str) -> str:
    """The piece of work that a test belongs to."""
    path = PurePosixPath(nodeid.partition("::")[0])
    folder = path.parent.name
    if folder in ONE_AT_A_TIME:
        return folder
    return str(path) if folder in WHOLE_FOLDERS or path.name in WHOLE_FILES else nodeid
