"""Which process launched us, from a made-up /proc."""

import os

from gradsync.runtime.proc import launcher_ancestor


def write(proc, pid, name, parent, start):
    """One stat file: pid (name) state ppid, 17 fields, then the start time (field 22)."""
    folder = proc / str(pid)
    folder.mkdir()
    between = " ".join(["0"] * 17)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} {between} {start} 0 0\n")


def test_the_nearest_launcher_counts(tmp_path):
    write(tmp_path, os.getppid(), "bash", 20, 500)
    write(tmp_path, 20, "hydra_pmi_proxy", 10, 400)
    write(tmp_path, 10, "mpiexec.hydra", 1, 300)
    assert launcher_ancestor(tmp_path) == "20:400"


def test_names_with_spaces_and_parentheses(tmp_path):
    write(tmp_path, os.getppid(), "a) S 7 (b", 10, 500)
    write(tmp_path, 10, "mpiexec.hydra", 1, 300)
    assert launcher_ancestor(tmp_path) == "10:300"


def test_without_a_launcher_the_parent_counts(tmp_path):
    write(tmp_path, os.getppid(), "my_launcher", 10, 500)
    write(tmp_path, 10, "mpirunner", 1, 300)
    assert launcher_ancestor(tmp_path) == f"{os.getppid()}:500"


def test_processes_that_cannot_be_seen(tmp_path):
    assert launcher_ancestor(tmp_path) == f"{os.getppid()}:"


def test_the_real_proc_gives_a_stable_answer():
    assert launcher_ancestor() == launcher_ancestor()
    assert launcher_ancestor().split(":")[1].isdigit()
