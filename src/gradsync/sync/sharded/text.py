"""Every rank's small value on every rank, as JSON over uint8 tensors."""

from __future__ import annotations

import json
from typing import Any

import torch

from gradsync.comm.base import Communicator


def all_gather_json(comm: Communicator, value: Any) -> list[Any]:
    """The values (anything JSON can write) of all ranks, in rank order. Not for the step.

    Two all-gathers over the whole group, on the CPU: int64 [1] a rank with the lengths, then the
    texts, uint8, padded to the longest.
    """
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = torch.zeros(comm.world_size, dtype=torch.int64)
    comm.all_gather(lengths, torch.tensor([len(text)])).wait()
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(text)] = text
    texts = torch.zeros(comm.world_size * longest, dtype=torch.uint8)
    comm.all_gather(texts, padded).wait()
    rows = texts.view(comm.world_size, longest)
    return [
        json.loads(bytes(row[:length].tolist()))
        for row, length in zip(rows, lengths.tolist(), strict=True)
    ]
