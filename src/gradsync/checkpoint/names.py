"""Parameter names without the traces of wrappers. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from gradsync.errors import CheckpointError

_WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def clean_name(name: str) -> str:
    """`name` without the path components that wrappers add (DDP, `torch.compile`, FSDP1 …).

    The last component is the tensor's own name and always stays: `_orig_mod.module.embed.weight`
    becomes `embed.weight`, a parameter called `module` keeps its name.
    """
    *parents, leaf = name.split(".")
    return ".".join([*(part for part in parents if part not in _WRAPPERS), leaf])


def clean_names(names: Iterable[str]) -> dict[str, str]:
    """Each name with its clean form.

    Raises:
        CheckpointError: two names become the same one, so that one tensor would be lost.
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
