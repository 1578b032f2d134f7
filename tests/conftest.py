"""Set-up of every test: a clean environment, the leak check, markers for real components."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from support import launchers, leaks
from support.requirements import require

MODULES_SET_ASIDE = pytest.StashKey[int]()
"""How many modules may be loaded before the garbage collector is told again to leave them alone."""
TIERS = ("unit", "ranks", "processes", "launchers", "gpu")
"""Cheapest first, so that a plain mistake shows before the launchers start."""

# A shared machine stalls now and then: no deadline per example; under CI the examples are fixed.
hypothesis.settings.register_profile(
    "house", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("house")


def pytest_configure(config: pytest.Config) -> None:
    """Give a pytest-xdist worker its own session, by which the leak check recognises it."""
    if hasattr(config, "workerinput"):
        os.setsid()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tiers in order; within one, the order stays."""
    tiers = {name: place for place, name in enumerate(TIERS)}
    items.sort(key=lambda item: tiers.get(item.path.parent.name, 0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """See `support.scheduling`."""
    from support.scheduling import Tiers

    return Tiers(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.launcher("mpirun")` and `@pytest.mark.gpu` skip or fail without one."""
    if len(sys.modules) > item.session.stash.get(MODULES_SET_ASIDE, 0):
        # Else each look for leaks goes through all that torch has: a quarter of a second.
        gc.collect()
        gc.freeze()
        item.session.stash[MODULES_SET_ASIDE] = len(sys.modules) + 100
    for mark in item.iter_markers("launcher"):
        require(mark.args[0])
    if item.get_closest_marker("gpu"):
        require("cuda")


@pytest.fixture(scope="session", autouse=True)
def _clean_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No variable of a launcher that started pytest itself; one cache for the session."""
    before = dict(os.environ)
    for name in filter(launchers.is_launcher_variable, before):
        del os.environ[name]
    os.environ["GRADSYNC_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    # Ranks that lose one another leave their stacks there. Short: Open MPI puts sockets there too.
    os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="gs-tests-")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else the first compile starts a pool
    # Torch sets it when the first optimizer imports its compiler; set here, it is no leak.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))
    yield
    shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """Fail a test that leaves something behind, naming it."""
    before = leaks.snapshot()
    yield
    found = leaks.leaks_since(before)
    if found:
        leaks.restore(before)
        pytest.fail("this test leaks: " + "; ".join(found), pytrace=False)


@pytest.fixture(scope="session")
def pool() -> Iterator[object]:
    """The session's worker processes: `pool.run(fn, world_size, *args)`."""
    from support.process_pool import ProcessPool

    workers = ProcessPool()
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set that no test changes."""
    from support.small_run import make_data

    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def slurm() -> Iterator[object]:
    """A real two-node Slurm on loopback (`SlurmCluster`), up for the rest of the session."""
    require("slurm")
    from support.slurm_cluster import SlurmCluster

    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One intra-op thread, which `gs.init(threads=1)` gives: `invariant` warns of more."""
    from gradsync.runtime.machine import pin_threads

    before = pin_threads(1)
    yield
    pin_threads(before)
