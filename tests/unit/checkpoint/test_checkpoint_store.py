"""Saving, finding, loading, keeping and refusing checkpoints."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import random
import socket
import time
from unittest import mock

import pytest
import torch

from gradsync.checkpoint.manifest import Manifest, seal
from gradsync.checkpoint.store import CheckpointStore, Snapshot, resolve
from gradsync.core.files import Filesystem, StagedDirectory
from gradsync.errors import CheckpointError, ConfigError

FILES = {"model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"}


def snapshot(step=100, **changes):
    shared = torch.arange(6.0).reshape(2, 3)
    parts = {
        "step": step,
        "tensors": {
            "model": {
                "embed.weight": shared,
                "half": torch.linspace(-3, 3, 10).bfloat16(),
                "turned": torch.arange(12).reshape(3, 4).t(),
                "strided": torch.arange(9.0)[::2],
                "flag": torch.tensor(True),
                "nothing": torch.empty(0, 3),
            },
            "optimizer": {"step/embed.weight": torch.tensor(7.0)},
        },
        "state": {"lr": 0.1 + 0.2, "position": 2**53 + 1, "name": "π", "list": [1, None, True]},
        "fingerprint": {"torch": "2.13.0", "threads": 1, "tf32": False, "device": None},
    }
    return Snapshot(**{**parts, **changes})


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path)


def steps(store):
    """Steps of the checkpoints that are there, the one saved last first."""
    manifests = [Manifest.read(path) for path in store.directory.glob("step-*")]
    return [m.step for m in sorted(manifests, key=lambda m: -m.sequence)]


def test_what_is_saved_is_what_is_loaded(tmp_path):
    store, saved = CheckpointStore(tmp_path / "run" / "checkpoints"), snapshot()
    path = store.save(saved)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000100"
    assert {entry.name for entry in path.iterdir()} == FILES
    loaded = store.load(path)
    assert (loaded.step, loaded.state, loaded.fingerprint) == (
        *(saved.step, saved.state, saved.fingerprint),
    )
    for stem, tensors in saved.tensors.items():
        assert set(loaded.tensors[stem]) == set(tensors)
        for name, tensor in tensors.items():
            assert loaded.tensors[stem][name].dtype == tensor.dtype
            assert torch.equal(loaded.tensors[stem][name], tensor), name


def test_names_are_clean_and_tied_weights_are_written_once(store):
    weight = torch.randn(50, 20)
    model = {
        "_orig_mod.module.embed.weight": weight,
        "_orig_mod.module.head.weight": weight,
        "module.blocks.0._orig_mod.same_values": weight.clone(),
        "module.view": weight[:10],
    }
    path = store.save(snapshot(tensors={"model": model}))
    assert (path / "model.safetensors").stat().st_size < 2.5 * weight.nbytes
    loaded = store.load(path).tensors["model"]
    assert set(loaded) == {"embed.weight", "head.weight", "blocks.0.same_values", "view"}
    assert loaded["head.weight"] is loaded["embed.weight"]
    assert loaded["blocks.0.same_values"] is not loaded["embed.weight"]
    assert torch.equal(loaded["view"], weight[:10])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"state": {"betas": (0.9, 0.95)}}, "state.betas: tuple cannot be kept in JSON"),
        ({"state": {"a": [{"b": torch.ones(1)}]}}, "state.a[0].b: Tensor cannot be kept in JSON"),
        ({"state": {"a": {3: "x"}}}, "state.a: key 3 is not text"),
        (
            {"tensors": {"model": {"a.module.w": torch.ones(1), "a.w": torch.ones(1)}}},
            "'a.module.w' and 'a.w' would both be",
        ),
    ],
)
def test_snapshots_that_cannot_be_kept_are_refused_and_nothing_stays(tmp_path, changes, words):
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        CheckpointStore(tmp_path).save(snapshot(**changes))
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="keep_last: got 0"):
        CheckpointStore(tmp_path, keep_last=0)


# --- damage ---------------------------------------------------------------------------------------


def test_every_flipped_bit_is_refused_and_the_one_before_is_used(store):
    store.save(snapshot(100))
    path = store.save(snapshot(200))
    rng = random.Random(0)
    for name in sorted(FILES):
        good = (path / name).read_bytes()
        for _ in range(100):
            bad, bit = bytearray(good), rng.randrange(len(good) * 8)
            bad[bit // 8] ^= 1 << bit % 8
            (path / name).write_bytes(bad)
            with pytest.raises(CheckpointError, match=rf"{path}/{name}: .*(SHA-256|damaged)"):
                store.load(path)
            info, problems = store.latest()
            assert info.manifest.step == 100
            assert len(problems) == 1
            assert problems[0].startswith(f"step-00000200 is of no use ({path}/{name}: ")
        (path / name).write_bytes(good)
    assert store.latest()[0].manifest.step == 200


def test_every_truncation_is_refused(store):
    path = store.save(snapshot())
    for name in sorted(FILES):
        good = (path / name).read_bytes()
        for size in {0, 1, 7, 8, 9, len(good) // 2, len(good) - 1, len(good) + 1}:
            (path / name).write_bytes((good + b" ")[:size])
            with pytest.raises(CheckpointError, match=rf"{name}: (damaged|{size} bytes, expected)"):
                store.load(path)
            assert store.latest()[0] is None
        (path / name).unlink()
        with pytest.raises(CheckpointError, match=f"{name}: missing"):
            store.load(path)
        (path / name).mkdir()
        with pytest.raises(CheckpointError, match=f"{name}: "):
            store.load(path)
        (path / name).rmdir()
        (path / name).write_bytes(good)
    assert store.load(path).step == 100


def lie(body):
    """About the format of a file: size and hash are right."""
    digest = hashlib.sha256(b"\xff" * 40).hexdigest()
    body["files"]["model.safetensors"] = {"size": 40, "sha256": digest}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda body: body.update(format_version=2), "format version 2, this gradsync reads 1"),
        (lambda body: body.update(surprise=1), "surprise"),
        (lambda body: body.pop("files"), "files"),
        (lambda body: body["aliases"]["model"].update(a="b"), "no tensor 'b'"),
        (lie, "model.safetensors: not readable as safetensors"),
    ],
)
def test_foreign_manifests_are_refused(store, change, words):
    """Manifests that are consistent in themselves, but not of our making."""
    path = store.save(snapshot())
    body = json.loads((path / "manifest.json").read_bytes())["manifest"]
    change(body)
    (path / "manifest.json").write_bytes(seal(body))
    if change is lie:
        (path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(CheckpointError) as caught:
        store.load(path)
    assert words in str(caught.value)


def test_a_renamed_checkpoint_is_not_another_step(store, tmp_path):
    store.save(snapshot(100)).rename(tmp_path / "step-00000900")
    info, problems = store.latest()
    assert info is None
    assert "step-00000900 is of no use" in problems[0]
    assert "is of step 100" in problems[0]


# --- nan and inf ----------------------------------------------------------------------------------


def of_old(directory, *arguments, **named):
    """Saved as versions did that did not look at values."""
    with mock.patch("gradsync.checkpoint.tensor_file.non_finite", return_value=""):
        return CheckpointStore(directory, keep_last=9).save(snapshot(*arguments, **named))


def poisoned(kind, value, name="w"):
    stem, _, inner = kind.partition(":")
    tensors = {"model": {"w": torch.ones(3)}, "optimizer": {}, "sync": {}, "buffers": {}}
    bad = torch.tensor([1.0, value, 2.0])
    return {**tensors, stem: {**tensors.get(stem, {}), f"{inner}{name}": bad}}


@pytest.mark.parametrize(
    ("kind", "value"),
    [("model", math.nan), ("optimizer:exp_avg/", math.inf), ("sync:outer_momentum/", -math.inf)],
)
def test_values_that_are_not_finite_are_not_saved(tmp_path, kind, value):
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(snapshot(1))
    with pytest.raises(CheckpointError, match="w holds nan or inf, from which no run can go on"):
        store.save(snapshot(2, tensors=poisoned(kind, value)))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_what_is_not_learnt_may_hold_inf(store):
    path = store.save(snapshot(1, tensors=poisoned("buffers", -math.inf, "mask")))
    assert store.latest()[0].path == path
    assert store.load(path).tensors["buffers"]["mask"][1] == -math.inf


def test_a_saved_nan_is_passed_over_and_pushes_nothing_out(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save(snapshot(1))
    bad = [of_old(tmp_path, step, tensors=poisoned("model", math.nan)) for step in (2, 3)]
    info, problems = store.latest()
    assert info.manifest.step == 1
    assert [line.partition(" is ")[0] for line in problems] == [path.name for path in bad[::-1]]
    assert problems[0].endswith("model.safetensors: nan or inf in w)")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: nan or inf in w"):
        store.load(bad[0])
    store.save(snapshot(2, state={"second": True}))  # the run that went on from step 1
    assert store.latest()[0].manifest.step == 2
    assert (tmp_path / "step-00000001").is_dir()
    store.save(snapshot(4))
    assert steps(store) == [4, 2]


# --- retention ------------------------------------------------------------------------------------


def test_the_best_stay_beside_the_last(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=2)
    for step, loss in enumerate([3.0, 1.0, None, 2.0, 2.0, 4.0], 1):
        store.save(snapshot(step, val_loss=loss))
    assert steps(store) == [6, 5, 2]  # of equal ones the newer
    assert Manifest.read(tmp_path / "step-00000002").val_loss == 1.0
    assert store.latest()[0].manifest.step == 6
    file = tmp_path / "step-00000002" / "state.json"
    file.write_bytes(b" " * file.stat().st_size)  # of no use: the best is another
    CheckpointStore(tmp_path, keep_last=1, keep_best=1).save(snapshot(7))
    assert steps(store) == [7, 5]
    CheckpointStore(tmp_path, keep_last=1).save(snapshot(8))
    assert steps(store) == [8]


@pytest.mark.parametrize("fresh", [False, True])
def test_damaged_ones_do_not_count_as_kept(tmp_path, fresh):
    store = CheckpointStore(tmp_path, keep_last=2)
    store.save(snapshot(1))
    (store.save(snapshot(2)) / "state.json").write_bytes(b"{}")
    path = store.save(snapshot(3))
    if fresh:  # same size, other content: only reading it tells
        (path / "state.json").write_bytes(b" " * Manifest.read(path).files["state.json"].size)
        store = CheckpointStore(tmp_path, keep_last=2)
    store.save(snapshot(4))
    assert steps(store) == ([4, 3, 2, 1] if fresh else [4, 3])
    if fresh:
        (tmp_path / "step-00000004" / "state.json").unlink()
        assert store.latest()[0].manifest.step == 1
    store.save(snapshot(5))
    store.save(snapshot(6))
    assert steps(store) == [6, 5]


def test_newest_means_saved_last(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (100, 200, 300):
        store.save(snapshot(step))
        assert steps(store) == [step, step - 100][: step // 100]
    # The run goes back to 200 and comes to 250: 300 is of the abandoned steps.
    store.save(snapshot(250))
    assert steps(store) == [250, 300]
    assert store.latest()[0].manifest.step == 250
    CheckpointStore(tmp_path, keep_last=2).save(snapshot(260))
    assert steps(store) == [260, 250]


def test_a_step_saved_again_is_replaced(store, tmp_path):
    store.save(snapshot(1))
    store.save(snapshot(2))
    path = store.save(snapshot(1, state={"second": True}))
    assert store.load(path).state == {"second": True}
    assert steps(store) == [1, 2]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_replacement_that_was_cut_short_leaves_the_old_one_usable(store, tmp_path):
    path = store.save(snapshot(1))
    old = path.rename(tmp_path / "step-00000001.old")
    info, problems = store.latest()
    assert (info.path, problems) == (old, [])
    assert store.load(old).step == 1
    assert resolve(tmp_path)[0] == old
    # Cut short later: the new one is there, but damaged. The old one must survive again.
    path.mkdir()
    assert store.latest()[0].path == old
    assert store.save(snapshot(1)) == path
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_only_temporary_directories_of_dead_writers_go(store, tmp_path):
    host = socket.gethostname()
    dead, alive = tmp_path / f".tmp-step-7-{host}-1-5", tmp_path / f".tmp-step-8-{host}-1-6"
    foreign, ancient = tmp_path / ".tmp-step-9-other-1-7", tmp_path / ".tmp-step-9-other-1-8"
    for path in (dead, alive, foreign, ancient):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"half")
    os.utime(ancient, (time.time() - 7200,) * 2)
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    lock = os.open(alive, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        path = store.save(snapshot(1))
        assert set(tmp_path.iterdir()) == {path, alive, foreign, other}
    finally:
        os.close(lock)
    with StagedDirectory(Filesystem(), tmp_path, "step-00000009") as staged:  # a writer at work
        store.save(snapshot(1))
        assert set(tmp_path.iterdir()) == {path, foreign, other, staged.path}


def test_an_interrupted_save_removes_its_temporary_directory(store, tmp_path):
    class Interrupting(dict):
        def items(self):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.save(snapshot(tensors=Interrupting()))
    assert not list(tmp_path.iterdir())


# --- resolve --------------------------------------------------------------------------------------


def test_resolve_takes_a_checkpoint_a_store_or_a_run(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    first, second = store.save(snapshot(1)), store.save(snapshot(2))
    assert resolve(first) == (first, [])
    assert resolve(tmp_path) == (second, [])
    assert resolve(tmp_path / "checkpoints") == (second, [])
    (second / "model.safetensors").unlink()
    path, problems = resolve(tmp_path)
    assert path == first
    assert "model.safetensors: missing" in problems[0]
    assert resolve(second) == (second, [])  # asked for by name: `load` says what is wrong
    with pytest.raises(CheckpointError, match=r"model\.safetensors: missing"):
        store.load(second)

    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="no checkpoint there; expected a step-"):
        resolve(empty)
    with pytest.raises(ConfigError, match="no such checkpoint"):
        resolve(empty / "step-00000004")
    (empty / "step-00000003").mkdir()
    with pytest.raises(CheckpointError, match=r"-00000003 is of no use .*manifest\.json: missing"):
        resolve(empty)
