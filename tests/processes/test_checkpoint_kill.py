"""Real processes that are killed, or run out of disk, while they save."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.errors import CheckpointError

# Saves in a loop and says so after each. With `at` > 0 it kills itself, as `kill -9` does, ahead of
# that write, counting from 1; with `limit` > 0 no file may grow beyond that many bytes.
CHILD = """
import os, resource, signal, sys
from pathlib import Path
import torch
from gradsync.core.files import Filesystem
from gradsync.checkpoint.store import CheckpointStore, Snapshot
from gradsync.errors import CheckpointError

directory, at, limit = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

class Deadly(Filesystem):
    writes = 0
    def write(self, file, data):
        self.writes += 1
        if self.writes == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write(file, data[:10_000])

store = CheckpointStore(directory, keep_last=2, fs=Deadly())
for step in range(1, 1_000_000):
    big = torch.full((20_000 if step < 3 or not limit else 200_000,), float(step))
    if limit and step == 3:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        store.save(Snapshot(step=step, tensors={"model": {"w": big}}, state={"step": step}))
    except CheckpointError as error:
        print(error, flush=True)
        sys.exit(3)
    print(step, flush=True)
"""


def start(directory, at=0, limit=0):
    command = [sys.executable, "-c", CHILD, str(directory), str(at), str(limit)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def check(directory, returned):
    """The latest good one is whole, and not older than the last save that returned."""
    info, problems = CheckpointStore(directory).latest()
    assert not problems
    if info is None:
        assert returned == 0
        return
    assert info.manifest.step in (returned, returned + 1)
    loaded = CheckpointStore(directory).load(info.path)
    assert loaded.state == {"step": info.manifest.step}
    assert loaded.tensors["model"]["w"].eq(info.manifest.step).all()


def test_killed_while_saving(tmp_path):
    rng = random.Random(0)
    # One in the very first save, the others anywhere in the first hundred.
    points = [5, rng.randrange(1, 1100)]
    children = [(tmp_path / f"self-{at}", start(tmp_path / f"self-{at}", at=at)) for at in points]
    for directory, child in children:
        output, _ = child.communicate(timeout=60)
        assert child.returncode == -9
        check(directory, returned=len(output.split()))
        CheckpointStore(directory).save(Snapshot(step=0, tensors={}, state={}))
        assert not list(directory.glob(".tmp-*"))


def test_killed_by_another_process(tmp_path):
    with start(tmp_path) as child:
        lines = [child.stdout.readline() for _ in range(20)]
        child.kill()
        lines += child.stdout.readlines()
    check(tmp_path, returned=int(lines[-1]))


def test_a_file_that_may_not_grow(tmp_path):
    output, _ = start(tmp_path, limit=100_000).communicate(timeout=60)
    *steps, message = output.splitlines()
    assert steps == ["1", "2"]
    assert message.startswith(f"cannot write {tmp_path}/step-00000003: File too large; ")
    assert f"the last good checkpoint, {tmp_path}/step-00000002, is intact" in message
    check(tmp_path, returned=2)
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    mount = shutil.which("mount")
    place = tmp_path / "disk"
    place.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_what_was_there(small_disk: Path):
    store = CheckpointStore(small_disk)
    first = store.save(Snapshot(step=1, tensors={"model": {"w": torch.ones(50_000)}}, state={}))
    too_big = Snapshot(step=2, tensors={"model": {"w": torch.ones(250_000)}}, state={})
    with pytest.raises(CheckpointError) as caught:
        store.save(too_big)
    assert "No space left on device" in str(caught.value)
    assert f"{first}, is intact" in str(caught.value)
    assert list(small_disk.iterdir()) == [first]
    assert store.load(first).tensors["model"]["w"].eq(1).all()


@pytest.mark.parametrize("then", ["", "time.sleep(1); del model; gc.collect()"])
def test_a_last_write_that_fails_is_no_success(then: str, tmp_path: Path) -> None:
    """The program is over before the disk is found to be full, without `sync.close()`."""
    program = f"""
import gc, sys, time, torch, gradsync as gs
model = torch.nn.Linear(2, 2)
gs.replicate(model, gs.World())
gs.save(sys.argv[1], step=1, model=model)
{then}
print("done")
sys.exit(75)
"""
    (tmp_path / "file").touch()
    argv = [sys.executable, "-c", program, str(tmp_path / "file" / "folder")]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "done\n"), ended.stderr
    assert "step-00000001: Not a directory" in ended.stderr
