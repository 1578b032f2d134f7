"""Checkpoints of one run: `step-00000100/` directories; a run resumes from the newest good one.

    checkpoints/
      step-00000100/            model.safetensors  optimizer.safetensors  state.json  manifest.json
      step-00000200/
      .tmp-step-00000300-…/     being written, or left by a killed writer

A split model, or state sharded over ranks, has one file for each rank with a distinct part, see
`pieces.py`.

There is no pointer to the latest one, because it could be wrong: the store finds it by checking the
manifests, newest first. Nothing is ever unpickled.

[Note: newest means saved last]
A run may return to step 100 and continue from there with another learning rate, while step 300 of
the first attempt still exists. The checkpoint to resume from is then the new step 200, not step
300. So each manifest has a sequence number, one more than all before it. The order of saves counts,
not the step or a clock.

[Note: replacing a step]
Saving a step that already exists replaces it: the old directory is renamed to `step-….old`, the new
one takes the name, and the old one is removed. Readers also read `.old`, so one good checkpoint of
that step exists at all times.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from gradsync.checkpoint.manifest import (
    MANIFEST_NAME,
    TENSORS_SUFFIX,
    Fingerprint,
    Manifest,
    check_json,
)
from gradsync.checkpoint.pieces import PART, Places, join_files
from gradsync.checkpoint.tensor_file import (
    ArrivingTensors,
    encode_tensors,
    read_tensors,
    split_aliases,
)
from gradsync.checkpoint.weights import clean_names
from gradsync.comm.finite import non_finite
from gradsync.core.files import (
    Filesystem,
    StagedDirectory,
    discard,
    make_dirs,
    one_line,
    parse_json,
    read_bytes,
    remove_leftovers,
)
from gradsync.errors import CheckpointError, ConfigError

_STATE_NAME = "state.json"
_OLD = ".old"
_LEARNT = frozenset({"model", "optimizer", "sync"})
"""Kinds of tensors that the next step depends on."""
STEP_NAME = re.compile(r"step-(\d{8,})(\.old)?")

Problems = list[str]
"""One line for each unusable checkpoint, with file and reason."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """All state that a run needs to resume after `step` optimizer steps."""

    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]
    """File stem ("model", "optimizer") -> name -> tensor, on any device."""
    state: dict[str, Any]
    """Other state, as JSON types: schedule, data position, random state, configuration."""
    fingerprint: Fingerprint = field(default_factory=dict)
    """Settings that the numbers depend on; compared at resume."""
    places: Mapping[str, Places] = field(default_factory=dict)
    """For each file of pieces to save: the place of each piece in its whole tensor. Tensors from
    `load` are whole."""
    val_loss: float | None = None
    """Validation loss of these weights, for `keep_best`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """A checkpoint's directory, and its manifest: files, hashes, fingerprint."""

    path: Path
    manifest: Manifest


class CheckpointStore:
    """Saves, finds and loads the checkpoints of one run. One process writes; any may read.

    `directory` contains the `step-…` directories, and is created at the first save; the last
    `keep_last` good ones are kept, and the `keep_best` with the lowest validation loss. `fs` has
    the file operations of a save, replaced in tests.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int = 3,
        keep_best: int = 0,
        *,
        fs: Filesystem | None = None,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"keep_last: got {keep_last}, expected at least 1")
        self.directory = Path(directory)
        self.keep_last, self.keep_best = keep_last, keep_best
        self._fs = fs or Filesystem()
        self._verified: set[Path] = set()  # written or hashed by this object: not hashed again

    def save(self, snapshot: Snapshot) -> Path:
        """Write a checkpoint and remove older ones beyond `keep_last` and `keep_best`.

        Tensor names are cleaned of wrappers, tied tensors are written once. On return the
        checkpoint is on the device; its directory is returned. See [Note: replacing a step] for a
        step that exists.

        CheckpointError if it cannot be written (disk full, I/O error): the message names the last
        good one, which is untouched, and nothing half-written stays. Also if the model, the
        optimizer's state or the strategy's has nan or inf: that checkpoint would push out one from
        which a run can resume.
        """
        target = self.directory / f"step-{snapshot.step:08d}"
        try:
            make_dirs(self._fs, self.directory)
            with StagedDirectory(self._fs, self.directory, target.name) as staged:
                self._write(staged, snapshot)
                self._clear_way(target)
                staged.commit(target)
        except OSError as error:
            last, _ = self.latest()
            rest = "there is no earlier good checkpoint"
            if last is not None:
                rest = f"the last good checkpoint, {last.path}, is intact"
            raise CheckpointError(
                f"cannot write {target}: {error.strerror or error}; {rest}"
            ) from error
        self._verified.add(target)
        self._clean_up()
        return target

    def latest(self) -> tuple[CheckpointInfo | None, Problems]:
        """The newest good checkpoint, with every byte checked, or None; and a line for each newer
        unusable one. A checkpoint with nan or inf is not good; earlier versions wrote them."""
        problems = []
        for _, path in reversed(self._ordered()):
            found = self._examine(path, contents=True)
            if isinstance(found, CheckpointInfo):
                return found, problems
            problems.append(f"{path.name} is of no use ({found})")
        return None, problems

    def load(self, path: Path) -> Snapshot:
        """Read one `step-…` directory, checking size and hash of every file; CheckpointError names
        the file, with the value found and expected.

        Tensors are on the CPU, backed by the file until they are copied elsewhere.
        """
        manifest = Manifest.read(path)
        manifest.verify(path)
        tensors = _read_files(path, manifest)
        try:
            parts = [stem for stem in tensors if stem.startswith(PART) and manifest.places]
            tensors |= join_files({stem: tensors.pop(stem) for stem in parts}, manifest.places)
            # A clip norm may be infinite.
            state = parse_json(read_bytes(path / _STATE_NAME), finite=False)
        except (CheckpointError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: {one_line(error)}") from None
        return Snapshot(
            step=manifest.step, tensors=tensors, state=state, fingerprint=manifest.fingerprint
        )

    def _write(self, staged: StagedDirectory, snapshot: Snapshot) -> None:
        check_json(snapshot.state, "state")
        state = json.dumps(snapshot.state, indent=1).encode()
        files = {_STATE_NAME: staged.write(_STATE_NAME, [state])}
        aliases: dict[str, dict[str, str]] = {}
        for stem, tensors in snapshot.tensors.items():
            once, aliases[stem] = tensors, {}
            if not isinstance(tensors, ArrivingTensors):
                clean = clean_names(tensors)
                once, aliases[stem] = split_aliases({clean[n]: t for n, t in tensors.items()})
            name = f"{stem}{TENSORS_SUFFIX}"
            finite = partial(_is_learnt, stem)
            files[name] = staged.write(name, encode_tensors(once, finite=finite))
        manifest = Manifest(
            step=snapshot.step,
            sequence=1 + max((number for number, _ in self._ordered()), default=0),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            files=files,
            aliases=aliases,
            fingerprint=dict(snapshot.fingerprint),
            places=dict(snapshot.places),
            val_loss=snapshot.val_loss,
        )
        staged.write(MANIFEST_NAME, [manifest.to_bytes()])
        staged.seal()

    def _clear_way(self, target: Path) -> None:
        """Free the name `target`; see [Note: replacing a step]."""
        if not target.exists():
            return
        old = target.with_name(target.name + _OLD)
        if old.exists():  # a replacement was interrupted: a good one of the two must stay
            if isinstance(self._examine(target, contents=True), CheckpointError):
                discard(self._fs, target)
                return
            discard(self._fs, old)
        self._fs.rename(target, old)

    def _clean_up(self) -> None:
        """Keep the last good ones, and the best; a failure here is only logged, since the
        checkpoint is safe.

        Checkpoints that this object has written or checked are not hashed again.
        """
        try:
            remove_leftovers(self._fs, self.directory)
            good: set[str] = set()
            best = self._best()
            for _, path in reversed(self._ordered()):
                enough = len(good) >= self.keep_last and path not in best
                if enough or _plain(path) in good:
                    self._verified.discard(path)
                    discard(self._fs, path)
                    continue
                found = self._examine(path, contents=path not in self._verified)
                if isinstance(found, CheckpointInfo):
                    good.add(_plain(path))
        except OSError as error:
            _log.warning("old checkpoints in %s stay: %s", self.directory, error)

    def _best(self) -> list[Path]:
        """The `keep_best` good ones with the lowest validation loss; of equal ones the newest."""
        found = []
        for number, path in self._ordered() if self.keep_best else ():
            info = self._examine(path, contents=path not in self._verified)
            if isinstance(info, CheckpointInfo) and (loss := info.manifest.val_loss) is not None:
                found.append((loss, -number, path))
        return [path for *_, path in sorted(found)[: self.keep_best]]

    def _ordered(self) -> Sequence[tuple[int, Path]]:
        """Sequence numbers and checkpoint directories, oldest first.

        One with an unreadable manifest comes right after the preceding step.
        """
        found = []
        for path in self.directory.iterdir() if self.directory.is_dir() else ():
            if match := STEP_NAME.fullmatch(path.name):
                found.append((int(match[1]), match[2] is None, path))
        ordered, before = [], 0
        for step, is_plain, path in sorted(found):
            with suppress(CheckpointError):
                before = Manifest.read(path).sequence
            ordered.append((before, step, is_plain, path))
        return [(number, path) for number, *_, path in sorted(ordered)]

    def _examine(self, path: Path, *, contents: bool) -> CheckpointInfo | CheckpointError:
        try:
            manifest = Manifest.read(path)
            if f"step-{manifest.step:08d}" != _plain(path):
                raise CheckpointError(f"{path / MANIFEST_NAME}: is of step {manifest.step}")
            manifest.verify(path, contents=contents)
            if contents:
                _read_files(path, manifest)
                self._verified.add(path)
        except CheckpointError as error:
            return error
        return CheckpointInfo(path=path, manifest=manifest)


def _read_files(path: Path, manifest: Manifest) -> dict[str, dict[str, Tensor]]:
    """Read the tensors of each file, backed by it; CheckpointError if a learnt one is not
    finite."""
    found = {}
    for stem, aliases in manifest.aliases.items():
        file = path / f"{stem}{TENSORS_SUFFIX}"
        found[stem] = read_tensors(file, aliases)
        learnt = ((name, t) for name, t in found[stem].items() if _is_learnt(stem, name))
        if bad := non_finite(learnt):
            raise CheckpointError(f"{file}: nan or inf in {one_line(bad)}")
    return found


def _is_learnt(stem: str, name: str) -> bool:
    """Whether nan or inf in this tensor prevents a resume."""
    return (name.partition("/")[0] if stem.startswith(PART) else stem) in _LEARNT


def _plain(path: Path) -> str:
    return path.name.removesuffix(_OLD)


def resolve(path: Path) -> tuple[Path, Problems]:
    """The checkpoint at `path` (a `step-…` directory, or else the latest good one of a run
    directory or its `checkpoints`), and one line for each newer damaged one.

    ConfigError if there is no checkpoint, CheckpointError if there is no good one.
    """
    path = Path(path)
    if (path / MANIFEST_NAME).exists() or STEP_NAME.fullmatch(path.name):
        if not path.is_dir():
            raise ConfigError(f"{path}: no such checkpoint")
        return path, []
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    info, problems = CheckpointStore(directory).latest()
    if info is None:
        reason = "; ".join(problems) or "no checkpoint there"
        kind = CheckpointError if problems else ConfigError
        raise kind(f"{path}: {reason}; expected a step-… directory or a run directory")
    return info.path, problems
