"""Tensors in the safetensors format: written here piece by piece, read by the safetensors library.

    8 bytes  length of the header, little endian
    header   JSON: name -> dtype, shape, [begin, end) of its bytes; blanks up to a multiple of 8
    data     the tensors' bytes, without gaps

Writing it here takes thirty lines, hashes the bytes during the write, needs no second copy of the
model in memory, and makes a full disk an `OSError`. Format: github.com/huggingface/safetensors,
section "Format".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

from gradsync.checkpoint.pieces import InOrder
from gradsync.comm.finite import non_finite
from gradsync.core.files import one_line
from gradsync.errors import CheckpointError

_CHUNK_BYTES = 1 << 23
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements in row-major order as bytes; a view of a contiguous CPU tensor, else a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in the order of a file."""
    # Widest elements first keeps every tensor aligned to its own element size.
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


class ArrivingTensors(InOrder[Tensor]):
    """Tensors produced elsewhere, one after the other, on request.

    Each is handed out once, in `file_order`, and then dropped. `take` produces the next one; its
    argument is the tensor's entry in `layout`, without data.
    """

    def __init__(self, layout: Mapping[str, Tensor], take: Callable[[Tensor], Tensor]) -> None:
        self.layout = layout
        super().__init__(file_order(layout), lambda name: take(layout[name]))


def split_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate tensors from their aliases. Returns the tensors, each under its first name, and
    {other name: first name}."""
    first: dict[tuple[object, ...], str] = {}
    once: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        owner = first.setdefault(alias_key(tensor), name)
        if owner == name:
            once[name] = tensor
        else:
            aliases[name] = owner
    return once, aliases


def alias_key(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors of the same memory, shape and strides."""
    place = tensor.data_ptr() if tensor.layout == torch.strided else id(tensor)
    return (tensor.device, place, tensor.dtype, tensor.shape, tensor.stride())


def encode_tensors(
    tensors: Mapping[str, Tensor], *, finite: Callable[[str], bool] = lambda _: False
) -> Iterator[memoryview | bytes]:
    """Encode tensors as a safetensors file, in chunks of at most 8 MiB; at most two
    `ArrivingTensors` are in memory at once.

    CheckpointError for a tensor without data (meta), sparse, of a dtype that the format lacks, or
    with nan or inf if `finite(name)` is true.
    """
    arriving = isinstance(tensors, ArrivingTensors)
    layout = tensors.layout if isinstance(tensors, ArrivingTensors) else tensors
    order = file_order(layout)
    header: dict[str, object] = {}
    end = 0
    for name in order:
        tensor = layout[name]
        if (
            (tensor.is_meta and not arriving)
            or tensor.layout != torch.strided
            or tensor.dtype not in _DTYPES
        ):
            raise CheckpointError(
                f"tensor {name!r} ({tensor.dtype}, {tensor.layout}, on {tensor.device}) cannot be "
                "saved: expected a dense tensor with data, of a float, int or bool dtype"
            )
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in order:
        tensor = tensors[name]
        if finite(name) and non_finite([(name, tensor)]):
            raise CheckpointError(f"{name} holds nan or inf, from which no run can go on")
        data = tensor_bytes(tensor)
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]


def read_tensors(path: Path, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """Read the CPU tensors of a file, every alias restored as the same tensor; CheckpointError
    if it is no safetensors file, or lacks the tensor of an alias."""
    try:
        tensors = load_file(path)
        return tensors | {alias: tensors[owner] for alias, owner in aliases.items()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (safetensors.SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({one_line(error)})") from error
    except KeyError as error:
        raise CheckpointError(
            f"{path}: has no tensor {one_line(error)}, which another name needs"
        ) from error
