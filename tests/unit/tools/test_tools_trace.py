"""Calls are counted by file, in threads too, and only while they should be."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from trace_step import Tracer


@pytest.fixture
def calls_of(tmp_path: Path) -> Callable[[str], Callable[[], None]]:
    """By name: a function that lies in a file of that name."""

    def load(name: str) -> Callable[[], None]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def called(*_):\n    pass\n")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.called

    return load


def test_calls_by_file(tmp_path: Path, calls_of: Callable[[str], Callable[[], None]]) -> None:
    main, beside, watch = (calls_of(f"package/{name}.py") for name in ("main", "beside", "watch"))
    elsewhere = calls_of("other/main.py")
    tracer = Tracer(tmp_path / "package")
    begin, end = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        beside()
        watch_thread.start()
        watch_thread.join()
        end.set()

    watch_thread = threading.Thread(target=watch, name="gradsync-watch")
    thread = threading.Thread(target=work)
    thread.start()
    main()
    with tracer.counting():
        main()
        main()
        elsewhere()
        begin.set()
        end.wait()
    main()
    thread.join()
    tracer.close()
    assert tracer.calls == {"main.py": 2, "beside.py": 1}
