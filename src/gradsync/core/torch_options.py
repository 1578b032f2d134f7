"""Options of torch's DistributedDataParallel and DataLoader where ours are expected: ignored, or
answered with the name here."""

from __future__ import annotations

import logging
from collections.abc import Collection
from inspect import signature
from typing import Any

from gradsync.errors import ConfigError

log = logging.getLogger("gradsync")

_BUFFERS = "buffers are averaged over the step, BatchNorm's as batch_norm= says"
_HAS_NO_MEANING = {
    "find_unused_parameters": "parameters without a gradient are found in every step",
    "gradient_as_bucket_view": "gradients lie in their buckets already",
    "static_graph": "no step is planned from the first one",
    "bucket_cap_mb": "this strategy has no buckets",
    **dict.fromkeys(("device_ids", "output_device", "dim"), "all is on this rank's device"),
    **dict.fromkeys(("broadcast_buffers", "forward_sync_buffers"), _BUFFERS),
    **dict.fromkeys(("pin_memory", "pin_memory_device"), "batches come on this rank's device"),
    "in_order": "batches always come in order",
}
_IS_CALLED = {
    **dict.fromkeys(("process_group", "device_mesh"), "gs.replicate(model, comm=gs.group(ranks))"),
    "init_sync": "True always: ranks start with rank 0's weights",
    "mixed_precision": "torch.autocast around the forward",
    "bucket_cap_mb_list": "bucket_mb=, one size for all",
    **dict.fromkeys(("sampler", "batch_sampler"), "shuffle= and seed=: samples are dealt to ranks"),
    "generator": "seed=",
}


def drop_torchs(who: str, options: dict[str, Any], known: Collection[str], torchs: type) -> None:
    """Drop those `options` of torch's class that are its defaults or change nothing here.

    Raises:
        ConfigError: one that is neither `known` nor such, with its name here if it has one.
    """
    theirs = signature(torchs).parameters
    for name in [name for name in options if name not in known]:
        value = options.pop(name)
        if name in theirs and (value is theirs[name].default or name in _HAS_NO_MEANING):
            why = _HAS_NO_MEANING.get(name, f"it is {torchs.__name__}'s default")
            log.debug("%s=%r is ignored: %s", name, value, why)
        elif name in _IS_CALLED:
            raise ConfigError(f"{name}= of torch is {_IS_CALLED[name]} here; got {value!r}")
        else:
            has = ", ".join(known) or "none"
            raise ConfigError(f"{who} has no option {name!r} (it has: {has})")
