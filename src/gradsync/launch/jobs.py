"""Which jobs were submitted from here: one JSON line each, in a file in the cache."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from gradsync.core.files import parse_json
from gradsync.runtime import environ


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A job as it was handed over."""

    job: str
    """Slurm's id."""
    name: str
    """Its name."""
    script: str
    """Absolute path of the script."""
    log: str
    """Absolute path of the log, %a standing for the task in an array."""
    run_dir: str
    """Run directory; "" when there is none."""
    when: str
    """Local time, ISO 8601."""


def jobs_file() -> Path:
    """`jobs.jsonl` in the cache."""
    return environ.cache_dir() / "jobs.jsonl"


def remember(job: Submitted) -> None:
    """Add a job.

    Raises:
        OSError: the cache cannot be written.
    """
    path = jobs_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(job)) + "\n")


def remembered() -> list[Submitted]:
    """All jobs, the latest last; lines that are none are passed over."""
    names = {field.name for field in fields(Submitted)}
    found = []
    try:
        lines = jobs_file().read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            values = parse_json(line.encode())
        except ValueError:  # torn by a full disk
            continue
        if isinstance(values, dict) and values.keys() == names:
            found.append(Submitted(**values))
    return found
