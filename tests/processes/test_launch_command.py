"""`gradsync launch`: scripts and programs as ranks, on one node and on two."""

from __future__ import annotations

import json
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gradsync.commands.cli.main import main
from gradsync.commands.launch import agent_rendezvous
from gradsync.commands.train.config_io import parse_config
from gradsync.runtime.store import wait_until
from support import foreign_files
from support.config_flags import train_arguments
from support.fork_server import WITH_RANKS, Forked, free_port, run_forked, torch_ranks
from support.launchers import clean_environment
from support.small_run import make_data, small_config

# Each rank notes what it was given, and leaves with the code it is told.
SCRIPT = """
import json, os, sys
from pathlib import Path
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_PORT")
note = {"argv": sys.argv[1:], "path": sys.path[0]} | {name: os.environ[name] for name in names}
out, code = Path(sys.argv[1]), int(sys.argv[2])
(out / f"rank{os.environ['RANK']}").write_text(json.dumps(note))
sys.exit(code)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "my script.py"
    path.write_text(SCRIPT)
    return path


def notes(folder: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("rank*"))]


def test_a_script_gets_its_arguments_as_they_are(script: Path, tmp_path: Path) -> None:
    words = [str(script), str(tmp_path), "75", "a b", "$HOME ${rank}", "$(x)", "", "--", "'"]
    python = ["python", "-W", "error"]
    assert main(["launch", "--nproc-per-node", "2", "--", *python, *words]) == 75
    ranks = notes(tmp_path)
    assert [rank["argv"] for rank in ranks] == [words[1:]] * 2
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["path"] for rank in ranks} == {str(tmp_path)}


PLAIN = """
if False:
    import torch
    import torch.nn
    loss.backward()
"""


@pytest.mark.parametrize(
    ("text", "warned"),
    [
        (PLAIN, True),
        (f"import gradsync as gs{PLAIN}", False),
        (f"# WORLD_SIZE and RANK come from the launcher{PLAIN}", False),
        (f"if False: pass{PLAIN}    from helpers import loss", False),
        ("pass", False),
    ],
)
def test_ranks_that_nothing_joins(text: str, warned: bool, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "helpers.py").touch()
    (tmp_path / "train.py").write_text(text)
    script = str(tmp_path / "train.py")
    assert main(["launch", "--nproc-per-node", "2", "--", script]) == 0
    assert (f"warning: {script} trains with torch, but nothing" in capfd.readouterr().err) == warned


def test_two_nodes(script: Path, tmp_path: Path) -> None:
    """Both on this machine, as far as their launchers know on two."""
    port = str(free_port())
    argv = ["launch", "--nproc-per-node", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    argv += ["--master-port", port]
    words = ["--", str(script), str(tmp_path), "75"]
    node_1 = ["-m", "gradsync", *argv, "--node-rank", "1", *words]
    with Forked(node_1, clean_environment()) as other:
        assert main([*argv, "--node-rank", "0", *words]) == 75
        assert other.wait(60) == 75
    ranks = notes(tmp_path)
    assert [(rank["RANK"], rank["LOCAL_RANK"], rank["GROUP_RANK"]) for rank in ranks] == [
        ("0", "0", "0"),
        ("1", "1", "0"),
        ("2", "0", "1"),
        ("3", "1", "1"),
    ]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
    assert {rank["MASTER_PORT"] for rank in ranks} == {port}


DIES_ONCE = """
import os, sys, time
from pathlib import Path
import gradsync as gs
from gradsync.runtime.store import SignedStore
died, write = Path(sys.argv[1], "died"), SignedStore.set
def dies(store, key, text):
    write(store, key, text)
    if key == "here/1" and not died.exists():
        died.touch()
        os.kill(os.getppid(), 9)
        os.kill(os.getpid(), 9)
SignedStore.set = dies
while os.environ["RANK"] == "0" and not died.exists():
    time.sleep(0.01)
with gs.init(rendezvous_timeout_s=20):
    pass
"""


def test_a_node_that_is_lost_before_the_ranks_meet_may_come_again(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES_ONCE)
    argv = ["launch", "--nproc-per-node=1", "--nnodes=2", "--master-addr=127.0.0.1"]
    argv += [f"--master-port={free_port()}", "dies.py", str(tmp_path)]
    nodes = [["-m", "gradsync", *argv[:1], f"--node-rank={n}", *argv[1:]] for n in (0, 1, 1)]
    with ExitStack() as stack:
        first, lost = (
            stack.enter_context(Forked(node, clean_environment(), cwd=tmp_path))
            for node in nodes[:2]
        )
        assert lost.wait(60) == -signal.SIGKILL
        (again,) = run_forked(nodes[2], cwd=tmp_path)
        assert (again.returncode, first.wait(60)) == (0, 0), again.stderr


@pytest.mark.parametrize(
    ("node", "message"), [(0, "but node(s) 1 did not come"), (1, "but node 0 does not answer")]
)
def test_a_missing_node_is_named(
    node: int,
    message: str,
    script: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_rendezvous, "_WAIT_S", 0.2)
    argv = ["launch", "--nproc-per-node", "1", "--nnodes", "2", "--node-rank", str(node)]
    argv += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    assert main([*argv, "--", str(script), str(tmp_path), "0"]) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("gradsync: error: ") == 1
    assert notes(tmp_path) == []


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
import torch
import gradsync as gs
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
with gs.init(device="cpu", threads=1) as world:
    Path(sys.argv[1], f"ready{world.rank}").touch()
    if world.rank == 1:
        gs.all_reduce(torch.ones(1))
    time.sleep(60)
"""


def test_ctrl_c_is_one_line_of_one_rank(tmp_path: Path) -> None:
    """Whether it is in the script, as rank 0 here, or waits for others."""
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    argv = ["launch", "--nproc-per-node", "2", "--", str(script), str(tmp_path)]
    with Forked(["-m", "gradsync", *argv], clean_environment()) as launcher:
        ready = [tmp_path / f"ready{rank}" for rank in range(2)]
        wait_until(lambda: all(path.exists() for path in ready), time.monotonic() + 60)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 130
        said = launcher.finished().stderr
    first, one, *more = said.splitlines()
    assert first == "gradsync: standard output is rank 0's; --log-dir DIR keeps the others'"
    assert re.fullmatch(r"gradsync: rank \d interrupted \(Ctrl-C\) in .*script.py:\d+", one)
    assert not more


UNCLOSED = """
import atexit, sys, threading, time
from pathlib import Path
import gradsync as gs
def say():  # first to be registered, last to be called
    print(*(t.name for t in threading.enumerate() if t.name.startswith("gradsync")))
    if world.rank == 1:
        here.touch()
atexit.register(say)
session, here = gs.init(device="cpu", threads=1), Path(sys.argv[1], "rank 1 has said it")
world = session.open()
while world.rank == 0 and not here.exists():  # it serves the store, which rank 1 still needs
    time.sleep(0.01)
"""


def test_a_session_that_nothing_closes_leaves_no_thread_to_pythons_end(tmp_path: Path) -> None:
    """As after Ctrl-C at the start of `__exit__`: such a thread aborts the process now and then."""
    script = tmp_path / "script.py"
    script.write_text(UNCLOSED)
    for rank in run_forked([script, tmp_path], torch_ranks(2)):
        assert rank.stdout == "\n", rank
        assert "Fatal" not in rank.stderr


def test_the_note_comes_before_anybody_leaves(tmp_path: Path) -> None:
    """Launchers end all ranks when one has left with 75; `exit.json` must be there by then."""
    late = tmp_path / "late.py"
    late.write_text(
        "import atexit, os, sys, time\n"
        "from pathlib import Path\n"
        "from gradsync.commands.cli.main import main\n"
        "from gradsync.commands.train import run\n"
        f"left, note_end = Path({str(tmp_path / 'left')!r}), run.note_end\n"
        "def slowly(config, outcome):\n"
        "    end = time.monotonic() + 1\n"
        "    while not left.exists() and time.monotonic() < end:\n"
        "        time.sleep(0.01)\n"
        "    if not left.exists():\n"
        "        note_end(config, outcome)\n"
        "run.note_end = slowly\n"
        "if os.environ['RANK'] == '1':\n"
        "    atexit.register(left.touch)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    run = tmp_path / "run"
    config = small_config(run, make_data(tmp_path / "data"), steps=1)
    for rank in run_forked([late, *train_arguments(config)], torch_ranks(2)):
        rank.ok()
    assert json.loads((run / "exit.json").read_text())["exit_code"] == 0


def test_a_resume_that_is_refused_is_said_once(tmp_path: Path) -> None:
    run = foreign_files.make_run(tmp_path)
    assert parse_config([str(run / "config.yaml")]).model.vocab_size == 257  # that of the data
    flags = ("--data", tmp_path / "data", "--out", run, "--steps", "2", "--nproc-per-node", "2")
    command = ("-m", "gradsync", "train", "tiny", *foreign_files.FLAGS, *flags)
    (done,) = run_forked([*command, "--seed=9"], [WITH_RANKS])
    assert done.returncode == 2, done.describe()
    assert done.stderr.count("gradsync: error:") == 1, done.stderr
    assert done.stderr.count("was trained with --seed") == 1, done.stderr
