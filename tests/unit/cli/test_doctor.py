"""`gradsync doctor`, in this process and as a program."""

import json
import re

import pytest
import torch

from gradsync.commands.cli import doctor
from gradsync.commands.plan.hardware_file import load_hardware
from gradsync.errors import ConfigError, LaunchError

MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1",
}


@pytest.fixture
def under_mpirun(monkeypatch):
    for name, value in MPI.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("under_mpirun")
def test_the_launcher_part_says_which_row_won_and_why(capsys):
    assert doctor.run(["--launcher"]) == 0
    out = capsys.readouterr().out
    assert "openmpi   rank 1 of 2, local rank 1 of 2  won" in out
    assert "rank=1(2)" in out
    assert "coordinator  file 127.0.0.1:free port" in out
    assert "machine" not in out


@pytest.mark.usefixtures("under_mpirun")
def test_json_is_one_document(capsys):
    assert doctor.run(["--launcher", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["world"]["rank"] == 1
    assert [row["name"] for row in document["rows"] if row["won"]] == ["openmpi"]
    assert document["coordinator"]["kind"] == "file"
    assert document["warnings"] == []
    assert "machine" not in document


def test_without_a_launcher_flag_the_machine_is_shown_too(capsys):
    assert doctor.run(["--json"]) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert machine["cores"] >= machine["threads_per_rank"] >= 1
    assert machine["memory_gib"] > 0
    assert machine["torch"][0].isdigit()
    assert doctor.run([]) == 0
    assert "machine" in capsys.readouterr().out


def test_a_slurm_shell_gets_the_warning(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert doctor.run(["--launcher"]) == 0
    assert "warning: this Slurm job has 8 tasks" in capsys.readouterr().out


def test_a_guess_of_hosts_is_said(capsys, monkeypatch):
    for name, value in MPI.items():
        monkeypatch.setenv(name, value.replace("2", "4") if name.endswith("WORLD_SIZE") else value)
    assert doctor.run(["--launcher"]) == 0
    out = capsys.readouterr().out
    assert "exchange their host names" in out
    assert "coordinator  mpi" in out


@pytest.mark.usefixtures("under_mpirun")
def test_a_contradiction_shows_every_family(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match=r"(?s)contradict.*srun +not set"):
        doctor.run(["--launcher"])


def test_no_way_to_find_rank_0_shows_every_family(monkeypatch):
    hand = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in hand.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=r"(?s)MASTER_ADDR.*env +rank 1 of 2.*srun +not set"):
        doctor.run(["--launcher"])


def test_an_unknown_flag_is_a_usage_error(capsys):
    with pytest.raises(ConfigError, match="Unrecognized options: --launchr; perhaps you meant"):
        doctor.run(["--launchr"])


def test_the_hardware_is_shown_for_people_and_programs(capsys):
    assert doctor.run([]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\nhardware\n  \d+ ", out)
    assert doctor.run(["--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["hardware"]["hosts"][0]["cores"] >= 1


def test_the_hardware_file_describes_this_machine_elsewhere(capsys, tmp_path):
    path = tmp_path / "here.yaml"
    assert doctor.run(["--hardware"]) == 0
    path.write_text(capsys.readouterr().out)
    here = load_hardware(str(path))
    assert doctor.run(["--hardware", "--json"]) == 0
    json_path = tmp_path / "here.json"
    json_path.write_text(capsys.readouterr().out)
    there = load_hardware(str(json_path))
    # Free memory changes between two looks.
    assert [device.name for device in here.devices] == [device.name for device in there.devices]
    assert here.hosts[0].cores == there.hosts[0].cores
    assert here.hosts[0].link == there.hosts[0].link


@pytest.mark.usefixtures("under_mpirun")
def test_ranks_of_a_launcher_are_devices_of_a_cpu(capsys):
    assert doctor.run(["--hardware", "--json"]) == 0
    devices = json.loads(capsys.readouterr().out)["hosts"][0]["devices"]
    gpus = torch.cuda.is_available()
    assert [each.get("count", 1) for each in devices if each["kind"] == "cpu"] == [2] * (not gpus)


def test_two_parts_only_are_refused():
    with pytest.raises(ConfigError, match="leave one out"):
        doctor.run(["--launcher", "--hardware"])


def test_findings_are_printed_with_their_cure_in_one_line(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib7")
    assert doctor.run([]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if "ib7" in line]
    assert line.startswith("  blocker  interface      GLOO_SOCKET_IFNAME names ib7")
    assert "; let GLOO_SOCKET_IFNAME name one of" in line
    assert lines[-1].startswith("verdict: not ready, 1 blocker,")
    assert not re.search(r"\bgib\b", "\n".join(lines), re.IGNORECASE)


def test_findings_stand_in_the_document_beside_what_was_there(capsys, tmp_path):
    assert doctor.run(["--json", "--out", str(tmp_path / "new")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"rows", "world", "coordinator", "machine", "hardware"} < document.keys()
    assert all(each.keys() == {"check", "level", "said", "cure"} for each in document["findings"])
    assert document["findings"][-1]["said"].startswith(str(tmp_path))
    assert document["ready"] is True


@pytest.mark.usefixtures("under_mpirun")
def test_a_contradiction_is_a_blocker_among_the_findings(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert doctor.run(["--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    first = document["findings"][0]
    assert document["ready"] is False
    assert (first["check"], first["level"]) == ("launcher", "blocker")
    assert "contradict" in first["said"]
    assert first["cure"].startswith("unset the ones")
    assert doctor.run([]) == 1
    assert "srun      not set" in capsys.readouterr().out


def test_a_slurm_shell_is_warned_among_the_findings(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert doctor.run([]) == 0
    assert "warning  launcher       this Slurm job has 8 tasks" in capsys.readouterr().out
