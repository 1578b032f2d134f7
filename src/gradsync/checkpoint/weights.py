"""Export, import and hash a module's tensors, under names without wrappers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from gradsync.checkpoint.tensor_file import alias_key, tensor_bytes
from gradsync.core.files import one_line
from gradsync.core.torch_private import WRAPPERS
from gradsync.errors import CheckpointError

_SHOWN = 3


def clean_name(name: str) -> str:
    """`name` without the path components that wrappers add (DDP, `torch.compile`, FSDP1 …).

    The last component is the tensor's own name and always stays: `_orig_mod.module.embed.weight`
    becomes `embed.weight`, a parameter called `module` keeps its name.
    """
    *parents, leaf = name.split(".")
    return ".".join([*(part for part in parents if part not in WRAPPERS), leaf])


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its clean form; CheckpointError if two have the same one, since one tensor
    would be lost."""
    cleaned: dict[str, str] = {}
    owner: dict[str, str] = {}
    for name in names:
        clean = clean_name(name)
        if clean in owner:
            raise CheckpointError(
                f"tensors {owner[clean]!r} and {name!r} would both be called {clean!r} "
                "in a checkpoint: rename the module that is called like a wrapper"
            )
        owner[clean] = name
        cleaned[name] = clean
    return cleaned


def pack_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a `state_dict` (parameters and persistent buffers) under clean names.

    They are not copied: save or copy them before the next step.
    """
    return {clean: state[name] for name, clean in clean_names(state).items()}


@torch.no_grad()
def load_weights(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into `model`, regardless of wrappers in either side's names; everything is
    checked first, see `match_weights`."""
    own = model.state_dict(keep_vars=True)
    for name, tensor in match_weights(own, tensors).items():
        own[name].copy_(tensor)


def match_weights(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` under the names of `own`, which is `model.state_dict(keep_vars=True)`; checked,
    nothing copied yet.

    A tied weight needs one of its names. Floating dtypes may differ. CheckpointError for missing,
    unexpected or misshapen tensors: counts, and up to three names.
    """
    saved = {clean: tensors[name] for name, clean in clean_names(tensors).items()}
    targets: dict[str, Tensor] = {}
    first: dict[int, str] = {}
    unexpected = set(saved)
    # A tied weight is one object under several names; any of them is accepted.
    for name, clean in clean_names(own).items():
        unexpected.discard(clean)
        if clean in saved:
            first.setdefault(id(own[name]), clean)
            targets[clean] = own[name]
    missing = [clean_name(name) for name, tensor in own.items() if id(tensor) not in first]
    misshapen = [
        f"{name} (got {_describe(saved[name])}, expected {_describe(target)})"
        for name, target in targets.items()
        if saved[name].shape != target.shape
        or saved[name].is_floating_point() != target.is_floating_point()
    ]
    faults = [
        f"{len(names)} {word}: {', '.join(names[:_SHOWN])}{', …' * (len(names) > _SHOWN)}"
        for word, names in (
            ("missing from the checkpoint", missing),
            ("unknown to the model", sorted(unexpected)),
            ("of another shape or kind", misshapen),
        )
        if names
    ]
    if faults:
        said = one_line("; ".join(faults))
        raise CheckpointError(f"the weights are those of another model: {said}")
    return {name: saved[clean] for name, clean in clean_names(own).items() if clean in saved}


def _describe(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def weights_sha256(weights: nn.Module | Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 over the tensors' bytes, one after another in the given order.

    Only elements are hashed: row-major, in each tensor's own dtype (fp32 for master weights),
    little endian, without names, shapes or separators. A tensor that appears again under another
    name is hashed once, at its first place. A module stands for its `named_parameters()`.
    """
    digest = hashlib.sha256()
    seen: set[tuple[object, ...]] = set()
    for _, tensor in weights.named_parameters() if isinstance(weights, nn.Module) else weights:
        if alias_key(tensor) not in seen:
            seen.add(alias_key(tensor))
            digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
