"""Every point at which a save can be cut short, and every disk that a power cut may leave.

A dying process keeps what it wrote (the page cache survives); a power cut keeps only what was
synced, and of the rest any part. Both are enumerated here; real kills are in the process tier.
"""

from __future__ import annotations

import errno
import random
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch

from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.core.files import Filesystem
from gradsync.errors import CheckpointError

# A first one, one that pushes out another, and one that replaces its own step.
STEPS = (1, 2, 3, 3)


def snapshot(step, tag):
    return Snapshot(
        step=step,
        tensors={"model": {"w": torch.full((9,), float(tag))}, "optimizer": {"m": torch.ones(2)}},
        state={"tag": tag},
    )


class Death(BaseException):
    """The process ends here: no handler may tidy up."""


class Observed(Filesystem):
    """Calls `before(operation, path, more)` ahead of each operation; nothing is really synced."""

    def __init__(self):
        for name in ("make_dir", "create", "write", "sync_file", "sync_dir", "rename", "remove"):
            setattr(self, name, partial(self.operate, name, getattr(super(), name)))

    def operate(self, name, really, subject, *more):
        if name == "write":
            more = (bytes(more[0][:100]),)  # a short write is legal, and makes more points to die
        self.before(name, subject if isinstance(subject, Path) else Path(subject.name), *more)
        return None if name.startswith("sync") else really(subject, *more)


class Recording(Observed):
    def __init__(self, root):
        super().__init__()
        self.root, self.log = root, []

    def before(self, operation, path, more=None):
        more = more.relative_to(self.root) if isinstance(more, Path) else more
        self.log.append((operation, path.relative_to(self.root), more))


class Failing(Observed):
    """Raises `error` at operation number `at`; when that is `Death`, at all that follow too."""

    def __init__(self, at, error):
        super().__init__()
        self.at, self.error, self.done = at, error, 0

    def before(self, operation, path, more=None):
        self.done += 1
        if self.done == self.at or (self.done > self.at and self.error is Death):
            self.last = operation
            raise self.error


def run_saves(directory, fs):
    """Save with tags 1, 2, …; yields each tag when its save has returned."""
    store = CheckpointStore(directory, keep_last=1, fs=fs)
    for tag, step in enumerate(STEPS, start=1):
        store.save(snapshot(step, tag))
        yield tag


def latest_tag(directory):
    """The tag of the latest good checkpoint, 0 if there is none; its parts must belong together."""
    store = CheckpointStore(directory)
    info, _ = store.latest()
    if info is None:
        return 0
    loaded = store.load(info.path)
    assert torch.equal(
        loaded.tensors["model"]["w"], snapshot(1, loaded.state["tag"]).tensors["model"]["w"]
    )
    return loaded.state["tag"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The operations of all saves, and how many had been done when each save returned."""
    root = tmp_path_factory.mktemp("recorded")
    fs = Recording(root)
    returned = {tag: len(fs.log) for tag in run_saves(root / "run" / "checkpoints", fs)}
    return fs.log, returned


def test_a_process_may_die_at_any_operation(tmp_path, recorded):
    for at in range(1, len(recorded[0]) + 1):
        directory = tmp_path / f"{at}" / "checkpoints"
        returned = 0
        with pytest.raises(Death):  # noqa: PT012 - the loop is what dies
            for tag in run_saves(directory, Failing(at, Death)):
                returned = tag
        assert latest_tag(directory) in (returned, returned + 1), at
        # The next run saves over whatever lies there, and tidies up.
        CheckpointStore(directory, keep_last=1).save(snapshot(2, 9))
        assert latest_tag(directory) == 9
        assert [path.name for path in directory.iterdir()] == ["step-00000002"], at


def test_any_operation_may_fail(tmp_path, recorded, caplog):
    for at in range(1, len(recorded[0]) + 1):
        directory = tmp_path / f"{at}" / "checkpoints"
        caplog.clear()
        fs = Failing(at, OSError(errno.EIO, "injected"))
        returned, error = 0, None
        try:
            for tag in run_saves(directory, fs):
                returned = tag
        except CheckpointError as caught:
            error = caught
        else:
            assert returned == len(STEPS)
            assert fs.last in ("remove", "rename")  # tidying up may fail
            assert "old checkpoints" in caplog.text
        assert latest_tag(directory) in (returned, returned + 1), at
        if error:
            assert f"{directory}/step-0000000" in str(error)
            assert "injected" in str(error)
            there = "is intact" if latest_tag(directory) else "no earlier good checkpoint"
            assert there in str(error)
            assert not list(directory.glob(".tmp-*")), at


@dataclass
class File:
    durable: bytes = b""
    written: bytes = b""


@dataclass
class Directory:
    durable: dict = field(default_factory=dict)
    seen: dict = field(default_factory=dict)
    pending: list = field(default_factory=list)  # (names it touches, what it does to the entries)

    def change(self, names, act):
        act(self.seen)
        self.pending.append((names, act))


class Disk:
    """Contents a device may hold: synced bytes and names for certain, of the rest any legal part.

    Names of one directory may reach the device in any order, except that what touches a name comes
    after what touched it before; a rename happens or does not. Unsynced bytes of a file: any first
    part, and what is missing of its length may read as zeros.
    """

    def __init__(self):
        self.root = Directory()

    def find(self, path):
        node = self.root
        for part in path.parts:
            node = node.seen[part]
        return node

    def apply(self, operation, path, more):
        if operation == "write":
            self.find(path).written += more
        elif operation == "sync_file":
            self.find(path).durable = self.find(path).written
        elif operation == "sync_dir":
            node = self.find(path)
            node.durable, node.pending = dict(node.seen), []
        else:
            parent, name = self.find(path.parent), path.name
            if operation in ("make_dir", "create"):
                new = File() if operation == "create" else Directory()
                parent.change({name}, lambda entries: entries.update({name: new}))
            elif operation == "remove":
                parent.change({name}, lambda entries: entries.pop(name))
            else:
                target = more.name
                parent.change(
                    {name, target}, lambda entries: entries.update({target: entries.pop(name)})
                )

    def after_power_cut(self, node, path, rng):
        if isinstance(node, File):
            kept = rng.randint(len(node.durable), len(node.written))
            zeros = rng.choice((0, len(node.written) - kept))
            path.write_bytes(node.written[:kept] + bytes(zeros))
            return
        path.mkdir()
        entries, stopped = dict(node.durable), set()
        chance = rng.choice((0.0, 0.5, 0.9, 1.0))
        for names, act in node.pending:
            if names & stopped or rng.random() >= chance:
                stopped |= names
            else:
                act(entries)
        for name, child in entries.items():
            self.after_power_cut(child, path / name, rng)


def power_cuts(log, returned, states, where, seed=0):
    """(state number, tag promised, tag found) for `states` random disks."""
    rng = random.Random(seed)
    for number in range(states):
        done = rng.randint(0, len(log))
        disk = Disk()
        for entry in log[:done]:
            disk.apply(*entry)
        disk.after_power_cut(disk.root, where / str(number), rng)
        promised = max((tag for tag, count in returned.items() if count <= done), default=0)
        yield number, promised, latest_tag(where / str(number) / "run" / "checkpoints")


def test_a_power_cut_leaves_the_old_one_or_the_new_one(tmp_path, recorded):
    for number, promised, found in power_cuts(*recorded, 600, tmp_path):
        assert found in (promised, promised + 1), number
        if number % 20 == 0:
            directory = tmp_path / str(number) / "run" / "checkpoints"
            CheckpointStore(directory, keep_last=1).save(snapshot(7, 9))
            assert latest_tag(directory) == 9
            assert [path.name for path in directory.iterdir()] == ["step-00000007"]


@pytest.mark.parametrize(
    "omitted",
    [
        lambda operation, path: operation == "sync_file",
        lambda operation, path: operation == "sync_file" and path.name == "state.json",
        lambda operation, path: operation == "sync_dir" and path.name.startswith(".tmp"),
        lambda operation, path: operation == "sync_dir" and path.name == "checkpoints",
        lambda operation, path: operation == "sync_dir" and path.name == "run",
    ],
)
def test_without_a_sync_the_power_cut_test_fails(tmp_path, recorded, omitted):
    log, returned = recorded
    weaker = [entry for entry in log if not omitted(*entry[:2])]
    kept = [not omitted(*entry[:2]) for entry in log]
    returned = {tag: sum(kept[:count]) for tag, count in returned.items()}
    cuts = power_cuts(weaker, returned, 400, tmp_path)
    assert any(found not in (promised, promised + 1) for _, promised, found in cuts)
