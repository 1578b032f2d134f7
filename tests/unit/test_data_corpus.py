import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.data import prepare as prepare_file
from gradsync.data.meta import read_meta
from gradsync.data.prepare import default_corpus
from gradsync.data.tokens import open_dataset
from gradsync.errors import DataError, RunError


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of five files, and an empty cache."""
    library = tmp_path / "lib"
    for name in (
        "os.py",
        "json/decoder.py",
        "test/test_os.py",
        "site-packages/x.py",
        "a/tests/t.py",
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_text(f"# {name}\n" * 100)
    (library / "data.txt").write_text("no source")
    monkeypatch.setattr(prepare_file.sysconfig, "get_path", lambda _: str(library))
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "cache"))
    return library


def test_the_sources_of_the_running_python_are_prepared_once() -> None:
    directory = default_corpus()
    meta = read_meta(directory)
    assert 400 < meta.documents < 1500
    assert meta.tokens["train"] + meta.tokens["val"] == meta.text_bytes + meta.documents
    assert 2.5 < meta.unigram_entropy_nats < 4.0
    assert len(open_dataset(directory, "val", 256)) > 1000
    before = (directory / "train.bin").stat().st_mtime_ns
    assert default_corpus() == directory
    assert (directory / "train.bin").stat().st_mtime_ns == before


def test_tests_and_installed_packages_are_left_out(small_library: Path) -> None:
    meta = read_meta(default_corpus())
    assert meta.documents == 2
    assert "Python" in meta.source


def test_another_library_gets_another_directory(small_library: Path) -> None:
    first = default_corpus()
    (small_library / "os.py").write_text("changed")
    assert default_corpus() != first


def test_processes_that_prepare_at_once_end_with_one_directory(tmp_path: Path) -> None:
    """Both wait for a line on stdin, then start together."""
    code = (
        "import sys; from gradsync.data.prepare import default_corpus; "
        "print('ready', flush=True); sys.stdin.readline(); print(default_corpus())"
    )
    environment = {"GRADSYNC_CACHE": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    found = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(found) == 1
    assert [str(path) for path in (tmp_path / "cache").iterdir()] == list(found)
    open_dataset(found.pop(), "train", 16)


def test_the_loser_of_a_race_uses_what_the_winner_made(
    small_library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deterministic: the winner finishes while the loser is between its check and its work."""
    real = prepare_file.prepare

    def after_a_winner(*arguments: object, **options: object) -> object:
        real(*arguments, **options)
        return real(*arguments, **options)

    monkeypatch.setattr(prepare_file, "prepare", after_a_winner)
    assert read_meta(default_corpus()) is not None


def test_a_python_without_sources_says_what_to_do(small_library: Path) -> None:
    for path in small_library.rglob("*.py"):
        path.unlink()
    with pytest.raises(DataError, match=r"no Python sources to learn from; .* --data"):
        default_corpus()


def test_a_cache_that_cannot_be_written_is_an_error(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRADSYNC_CACHE", str(tmp_path / "file"))
    with pytest.raises(RunError, match=r"preparing .* failed: .*GRADSYNC_CACHE can name"):
        default_corpus()
