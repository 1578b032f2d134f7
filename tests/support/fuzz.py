"""Inputs that are almost right: JSON documents with a few changes, as values and as bytes.

Each test tries a few, the same ones each time. A search by hand takes more:
`GRADSYNC_FUZZ_EXAMPLES=10000 pytest -n 0 --timeout 0 tests/unit/test_fuzz_files.py`.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

FEW = 30
LONGEST_S = 5.0

fuzzed = settings(
    max_examples=int(os.environ.get("GRADSYNC_FUZZ_EXAMPLES", FEW)),
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # a document is read more easily than its seed
    suppress_health_check=list(HealthCheck),
)

randoms = st.integers(0, 2**64 - 1).map(Random)

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3.5, -0.0, 1e308, 2**31, 2**53, 2**63, -(2**63), 2**64),
    *(10**18, 10**39, float("nan"), float("inf"), -float("inf")),
    *("", "a", "../../x", "/dev/zero", "\0", "\ud800", "\u202e\n", "9" * 50, "x" * 5_000, "NaN"),
    *([], {}, [0], [-1], [2**62, 2**62], [[[[]]]], {"a": {"b": [1]}}, ["a", None], {"": 0}),
)


@contextmanager
def within_seconds() -> Iterator[None]:
    """Check that the enclosed code takes less than five seconds of a processor."""
    began = time.process_time()
    yield
    assert time.process_time() - began < LONGEST_S


def changed(document: Any, random: Random) -> Any:
    """A copy with one to four changes: values replaced, dropped, moved, repeated or nested."""
    root = [copy.deepcopy(document)]
    for _ in range(random.randint(1, 4)):
        place = random.choice(_containers(root))
        keys = list(place) if isinstance(place, dict) else range(len(place))
        if keys:
            ways = (_replace, _replace, _near, _drop, _rename, _nest, _swap)
            random.choice(ways)(place, random.choice(keys), random)
    return root[0] if root else None


def _containers(document: Any) -> list[Any]:
    found, left = [], [document]
    while left:
        value = left.pop()
        if isinstance(value, dict | list):
            found.append(value)
            left += value.values() if isinstance(value, dict) else value
    return found


def _replace(place: Any, key: Any, random: Random) -> None:
    place[key] = copy.deepcopy(random.choice(ODD))


def _near(place: Any, key: Any, random: Random) -> None:
    value = place[key]
    if isinstance(value, int | float):
        place[key] = random.choice((value + 1, value - 1, -value, value * 2, str(value), [value]))
    elif isinstance(value, str):
        place[key] = random.choice((value[1:], value + value, value.upper(), [value]))


def _drop(place: Any, key: Any, _: Random) -> None:
    del place[key]


def _rename(place: Any, key: Any, random: Random) -> None:
    if isinstance(place, dict):
        place[random.choice((f"{key}2", "", "..", str(random.random()), "a" * 300))] = place[key]


def _nest(place: Any, key: Any, random: Random) -> None:
    for _ in range(random.choice((1, 3, 30, 70))):
        place[key] = random.choice(([place[key]], {"a": place[key]}))


def _swap(place: Any, key: Any, random: Random) -> None:
    other = random.choice(list(place)) if isinstance(place, dict) else random.randrange(len(place))
    place[key], place[other] = place[other], place[key]


def damaged(content: bytes, random: Random) -> bytes:
    """`content` with bytes flipped, cut out, repeated or put in."""
    found = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(found) + 1)
        end = min(len(found), at + random.choice((1, 1, 1, 8, 100)))
        pick = random.randrange(5)
        if pick == 0 and at < len(found):
            found[at] ^= 1 << random.randrange(8)
        elif pick == 1:
            del found[at:end]
        elif pick == 2:
            found[at:at] = found[at:end]
        elif pick == 3:
            found[at:at] = random.choice((b"[" * 5_000, b'{"a":' * 500, b"9" * 5_000, b"\xff\xfe"))
        else:
            found[at:end] = random.randbytes(end - at)
    return bytes(found)


def text_of(document: Any, random: Random) -> bytes:
    """As JSON, sometimes with a key twice or bytes damaged."""
    text = json.dumps(document).encode()
    if isinstance(document, dict) and document and random.random() < 0.1:
        key = random.choice(list(document))
        text = text[:-1] + f",{json.dumps(key)}:1}}".encode()
    return damaged(text, random) if random.random() < 0.3 else text
