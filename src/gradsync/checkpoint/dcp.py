"""Torch's distributed checkpoints (DCP), written and read by one process: for conversion alone.

    model.NAME                       a weight
    optimizer.state.NAME.exp_avg     state of the parameter NAME, as torch's own
    optimizer.param_groups.0.lr      `get_optimizer_state_dict` has it

[Note: what is unpickled]
DCP pickles its metadata, and an ordinary reader builds and calls whatever the file names. Here only
the classes of that metadata are built; any other name ends the reading. Tensors are read by torch,
with `weights_only`; values that are not tensors are left where they are.
"""

from __future__ import annotations

import enum
import io
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from pickle import Unpickler, UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as torch_dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from gradsync.core.files import one_line, read_bytes
from gradsync.errors import CheckpointError

METADATA_NAME = ".metadata"
_LARGEST = 1 << 28
_MODEL = "model"
_MODULES = frozenset(
    {"torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"}
)
_OTHERS = frozenset(
    {
        ("torch.serialization", "_get_layout"),
        *((module, "PosixPath") for module in ("pathlib", "pathlib._local")),
    }
)
_HOW = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""How a step is computed: our checkpoints leave it to the run, torch's loader asks for it."""


def is_dcp(path: Path) -> bool:
    """Whether this is the folder of a distributed checkpoint."""
    return (path / METADATA_NAME).is_file()


def write_dcp(folder: Path, state: Mapping[str, Any]) -> None:
    """Write nested dicts of tensors and plain values as a checkpoint in `folder`."""
    with _quiet():
        writer = torch_dcp.FileSystemWriter(folder)
        torch_dcp.save(dict(state), storage_writer=writer, no_dist=True)


def optimizer_of(tensors: Mapping[str, Tensor], packed: Mapping[str, Any]) -> dict[str, Any]:
    """State from `pack_optimizer`, in the form of torch's `get_optimizer_state_dict`."""
    state = {
        name: {slot: tensors[f"{slot}/{name}"] for slot in entry["slots"]} | entry["values"]
        for name, entry in packed["params"].items()
    }
    groups = [
        {**_HOW, **{k: tuple(v) if k == "betas" else v for k, v in group.items()}}
        for group in packed["groups"]
    ]
    return {"state": state, "param_groups": groups}


def read_dcp(folder: Path) -> dict[str, Tensor]:
    """Whole weights from a checkpoint of any number of ranks: what it has under `model`, or, where
    there is no such thing, every tensor, under its flat name.

    Raises:
        CheckpointError: it cannot be read, or names what no checkpoint needs.
    """
    reader = _Reader(folder)
    try:
        metadata = reader.read_metadata()
        paths = metadata.planner_data or {}
        stored = {
            name: each
            for name, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }
        ours = [name for name in stored if len(p := paths.get(name, ())) > 1 and p[0] == _MODEL]
        state: dict[str, Any] = {
            name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
            for name in ours or stored
        }
        with _quiet():
            torch_dcp.load(state, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # the latter is no Exception
        reason = one_line(str(error).splitlines()[-1] if str(error) else type(error).__name__)
        raise CheckpointError(f"{folder}: not readable as DCP ({reason})") from error
    if not state:
        raise CheckpointError(f"{folder}: holds no tensor")
    return {name.removeprefix(f"{_MODEL}.") if ours else name: t for name, t in state.items()}


def read_plain(path: Path) -> Any:
    """The dicts, lists, texts and numbers in a small pickle, such as nanoGPT's `meta.pkl`, in which
    nothing is built or called; UnpicklingError and whatever else is wrong with it."""
    return _MetadataUnpickler(io.BytesIO(read_bytes(path, _LARGEST))).load()


class _Reader(torch_dcp.FileSystemReader):
    """Torch's reader of files, but for [Note: what is unpickled]."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        text = read_bytes(Path(self.path) / METADATA_NAME, _LARGEST)
        metadata = _MetadataUnpickler(io.BytesIO(text)).load()
        if not isinstance(metadata, Metadata):
            raise UnpicklingError("the metadata is something else")
        return metadata


class _MetadataUnpickler(Unpickler):
    """Builds the classes of a checkpoint's metadata, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """See [Note: what is unpickled]."""
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        found = None
        if module == "torch":
            found = getattr(torch, name, None)
            if isinstance(found, torch.dtype) or found is torch.Size:
                return found
        elif module in _MODULES:
            found = super().find_class(module, name)
        is_record = is_dataclass(found) or (
            isinstance(found, type) and issubclass(found, enum.Enum)
        )
        if isinstance(found, type) and found.__module__ == module and is_record:
            return found
        raise UnpicklingError(f"its metadata names {module}.{name}, which no checkpoint needs")


@contextmanager
def _quiet() -> Generator[None]:
    """Torch warns that one process does the work of all, which is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield
