"""What one leaf and one update cost on a device, as measured or estimated; pure, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketReady:
    """When a bucket's last gradient is there."""

    num_bytes: int
    """Of its gradients."""
    ready_s: float
    """Seconds after backward began; the last one's is at most `StepProfile.backward_s`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One rank's work, alone on its device, without any communication."""

    forward_s: float
    """Of one leaf."""
    backward_s: float
    """Of one leaf."""
    update_s: float
    """Clipping and optimizer over all parameters."""
    buckets: tuple[BucketReady, ...]
    """In the order in which they fill."""
    jitter: tuple[float, ...] = (1.0,)
    """Durations of a leaf over their median, as measured; stragglers are drawn from them."""
    measured: bool = False
    """False: estimated from peak arithmetic and bandwidth."""

    @property
    def leaf_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    @property
    def gradient_bytes(self) -> int:
        """Of all buckets."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StepProfile:
        """The inverse of `to_json`."""
        buckets = tuple(BucketReady(**bucket) for bucket in document["buckets"])
        rest = {name: value for name, value in document.items() if name != "buckets"}
        return cls(**rest | {"buckets": buckets, "jitter": tuple(document["jitter"])})
