"""A missing component skips a test, unless the run declared that it is there."""

import pytest

from support import requirements
from support.requirements import require

SKIPPED = pytest.skip.Exception
FAILED = pytest.fail.Exception


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = dict.fromkeys(requirements.MISSING, lambda: ["a part"])
    monkeypatch.setattr(requirements, "MISSING", gone)


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize(
    ("declared", "name", "outcome"),
    [
        ("", "mpirun", SKIPPED),
        ("torchrun,slurm", "mpirun", SKIPPED),
        ("torchrun,mpirun", "mpirun", FAILED),
        ("slurm", "srun", FAILED),
        ("all", "iproute2", FAILED),
        ("all", "cuda", SKIPPED),
        ("cuda", "cuda", FAILED),
    ],
)
def test_skips_or_fails(
    declared: str, name: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADSYNC_TEST_REQUIRE", declared)
    with pytest.raises((SKIPPED, FAILED), match="needs a part") as caught:
        require(name)
    assert caught.type is outcome
