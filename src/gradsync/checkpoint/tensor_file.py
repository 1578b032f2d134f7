"""Tensors in the safetensors format: written here piece by piece, read by the safetensors library.

    8 bytes  length of the header, little endian
    header   JSON: name -> dtype, shape, [begin, end) of its bytes; blanks up to a multiple of 8
    data     the tensors' bytes, without gaps

Writing it ourselves costs thirty lines and lets the bytes be hashed on their way, without a second
copy of the model in memory, and lets a full disk be an `OSError`.
Format: github.com/huggingface/safetensors, section "Format".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor

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
    """The elements in row-major order as bytes; a view where the tensor is a contiguous CPU one."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def file_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names in the order in which a file has them."""
    # Widest elements first keeps every tensor aligned to its own element size.
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


class ArrivingTensors(Mapping[str, Tensor]):
    """Tensors that come from somewhere else one after the other, when they are asked for.

    Each is handed out once, in `file_order`, and then forgotten.

    Args:
        layout: their shapes and dtypes, tensors without data.
        take: the next one, like the one of `layout` that it is given.
    """

    def __init__(self, layout: Mapping[str, Tensor], take: Callable[[Tensor], Tensor]) -> None:
        self.layout = {name: layout[name] for name in file_order(layout)}
        self._take = take
        self._left = list(reversed(self.layout))

    def __getitem__(self, name: str) -> Tensor:
        assert name == self._left.pop(), "each tensor once, in order"
        return self._take(self.layout[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def split_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tied tensors once.

    Returns:
        the tensors, each under the first of its names; and {other name: first name}.
    """
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
    """Equal for two tensors that are the same memory seen the same way."""
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def encode_tensors(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file, in pieces of at most 8 MiB.

    Of `ArrivingTensors`, at most two are in memory at once.

    Raises:
        CheckpointError: a tensor without data (meta), sparse, or of a dtype the format lacks.
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
        data = tensor_bytes(tensors[name])
        for begin in range(0, len(data), _CHUNK_BYTES):
            yield data[begin : begin + _CHUNK_BYTES]


def read_tensors(path: Path, aliases: Mapping[str, str]) -> dict[str, Tensor]:
    """The CPU tensors of a file, with every alias put back as the same tensor.

    Raises:
        CheckpointError: not a safetensors file, or an alias of a tensor that is not in it.
    """
    try:
        tensors = load_file(path)
        return tensors | {alias: tensors[owner] for alias, owner in aliases.items()}
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not readable as safetensors ({error})") from error
    except KeyError as error:
        raise CheckpointError(f"{path}: has no tensor {error}, which another name needs") from error
