"""Parameter names without the traces of wrappers."""

from __future__ import annotations

from collections.abc import Iterable

from gradsync.core.torch_private import WRAPPERS
from gradsync.errors import CheckpointError


def clean_name(name: str) -> str:
    """`name` without the path components that wrappers add (DDP, `torch.compile`, FSDP1 …).

    The last component is the tensor's own name and always stays: `_orig_mod.module.embed.weight`
    becomes `embed.weight`, a parameter called `module` keeps its name.
    """
    *parents, leaf = name.split(".")
    return ".".join([*(part for part in parents if part not in WRAPPERS), leaf])


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Map each name to its clean form.

    Raises:
        CheckpointError: two names have the same clean form, so that one tensor would be lost.
    """
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
