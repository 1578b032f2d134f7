"""`tools/claims.py`: what it compares, what it refuses, and that the page is up to date."""

from __future__ import annotations

from pathlib import Path

import claims
import pytest

DATA = (claims.ROOT / claims.DATA).read_text()
WORDS = (
    *("DistributedSampler", "set_epoch", "require_backward_grad_sync", "model.module"),
    *("linear scaling", "speed-up"),
)


def folder_with(tmp_path: Path, data: str) -> Path:
    """A project that has only `data`, and the page that they quote."""
    (tmp_path / "docs" / "guide").mkdir(parents=True)
    quoted = "docs/guide/strategies.md"
    (tmp_path / quoted).write_text((claims.ROOT / quoted).read_text())
    (tmp_path / claims.DATA).write_text(data)
    return tmp_path


def test_the_page_is_made_from_the_data() -> None:
    assert claims.main(["--check"]) == 0


def test_check_tells_an_old_page_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = folder_with(tmp_path, DATA)
    assert claims.main(["--check"], root) == 1
    assert "run tools/claims.py" in capsys.readouterr().out
    assert not (root / claims.PAGE).exists()
    assert claims.main([], root) == 0
    assert claims.main(["--check"], root) == 0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('verdict = "corrected"', 'verdict = "wrong"', "the verdict is one of"),
        ('in = ["tutorial"]', 'in = ["elsewhere"]', "unknown document elsewhere"),
        ("| 31.5 |", "| 31.6 |", "strategies.md has other lines now"),
        ('figure = "1.333 S"', 'figure = "1.334 S"', "no command printed '1.334 S'"),
    ],
)
def test_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, says: str
) -> None:
    assert old in DATA
    with pytest.raises(SystemExit, match="2"):
        claims.main([], folder_with(tmp_path, DATA.replace(old, new, 1)))
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prints", "output", "tolerance", "same"),
    [
        ("a 10 b", "x\n  a   10 b\n", 0.0, True),
        ("a 10 b", "a 11 b", 0.0, False),
        ("a 10 b", "a 11 b", 0.1, True),
        ("a 1.0e-2 b", "a 1.2e-2 b", 0.1, False),
        ("a 2,799 of", "a 2,798 of", 0.0, False),
        ("a 10 b", "c 10 b", 1.0, False),
        ("a 10 b", "a 10 b c", 0.0, False),
        ("a 10 …", "a 10 and more 7", 0.0, True),
        ("a 10 …", "b a 10 and more", 0.0, False),
        ("a\nb", "b\na", 0.0, True),
        ("a\nb", "a", 0.0, False),
    ],
)
def test_lines_are_compared(prints: str, output: str, tolerance: float, same: bool) -> None:
    assert (not claims.missing(prints, output, tolerance)) is same


@pytest.mark.parametrize("word", WORDS)
def test_words_of_the_documents_lead_somewhere(word: str) -> None:
    """Searched for in the page, each has a line with a link."""
    page = (claims.ROOT / claims.PAGE).read_text().partition("\n## Words of the documents\n")[2]
    assert any(word in line and "](" in line for line in page.splitlines())


def test_scripts_stay_short_and_are_all_on_the_page() -> None:
    for script in (claims.ROOT / "examples" / "claims").glob("*.py"):
        assert len(script.read_text().splitlines()) <= 40, script.name
        assert f"examples/claims/{script.name}" in DATA, script.name
