"""Options of a session, see `gradsync.init`."""

from __future__ import annotations

from dataclasses import dataclass

from gradsync.errors import ConfigError
from gradsync.runtime.bounds import check_times
from gradsync.runtime.watch import REPORT_S


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionOptions:
    """Options of a session; see `init`."""

    device: str = "auto"
    backend: str | None = None
    timeout_s: float = 1800.0
    rendezvous_timeout_s: float = 60.0
    silence_s: float = 10.0
    threads: int | None = None
    seed: int | None = None
    keep_memory: bool = False
    catch_stop: bool = False
    on_loss: str = "end"
    report_wait_s: float = REPORT_S
    stacks_dir: str = ""

    def __post_init__(self) -> None:
        check_times(self)
        if self.silence_s < 1:
            raise ConfigError(f"silence_s must be at least 1; got {self.silence_s}")
        if self.on_loss not in ("end", "shrink"):
            raise ConfigError(f"on_loss must be 'end' or 'shrink'; got {self.on_loss!r}")
