"""A real two-node Slurm on loopback: munged, slurmctld and two slurmd, private to one temp dir.

Nothing outside the temp dir is written and the daemons listen on 127.0.0.1 only, so several
clusters may live on one machine. The node names n1 and n2 do not resolve in DNS, as on many real
clusters seen from a container; only Slurm knows their address.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Unpack

from support import processes
from support.fork_server import free_port
from support.launchers import Finished, Options, Words, clean_environment, run_command

NODES = ("n1", "n2")
CPUS_PER_NODE = 4
START_TIMEOUT_S = 15.0
START_ATTEMPTS = 3
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "salloc", "scontrol", "sinfo")
ENDED_STATES = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


def program_path() -> str:
    """PATH with the folders where Debian keeps daemons, which a user's PATH may lack."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def missing_programs() -> list[str]:
    """The Slurm and munge programs that are not installed."""
    return [name for name in PROGRAMS if shutil.which(name, path=program_path()) is None]


class ClusterError(RuntimeError):
    """The cluster did not come up; the message carries the daemons' logs."""


class SlurmCluster:
    """Two nodes of four (pretended) CPUs each; a context manager.

    `env` is what a process needs to reach this cluster (`SLURM_CONF`); `root` the temp dir with
    the logs.
    """

    def __init__(self) -> None:
        # A short path: the name of a Unix socket ends at 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="gs-slurm-", dir="/tmp"))
        self.root.chmod(0o755)  # munged wants a socket that others could reach
        self.env = {"SLURM_CONF": str(self.root / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop_daemons()
        shutil.rmtree(self.root)

    def command(self, argv: Words, **options: Unpack[Options]) -> Finished:
        """Any command (`salloc`, `scontrol`, `scancel` …) that is to talk to this cluster."""
        extra_env = {**self.env, **options.pop("extra_env", {})}
        return run_command(argv, extra_env=extra_env, **options)

    def srun(
        self, n: int, argv: Words, *, nodes: int = 2, flags: Words = (), **options: Unpack[Options]
    ) -> Finished:
        """`srun -n N -N NODES ARGV` for any command (`launchers.run_srun` is for Python ones)."""
        return self.command(["srun", f"--ntasks={n}", f"--nodes={nodes}", *flags, *argv], **options)

    def sbatch_script(
        self, text: str, *, flags: Words = (), timeout_s: float = 60.0, **options: Unpack[Options]
    ) -> Finished:
        """Submit the script `text` and wait for its end; the output and exit code are the job's."""
        folder = Path(tempfile.mkdtemp(prefix="job-", dir=self.root))
        script, out, err = folder / "job.sh", folder / "out.txt", folder / "err.txt"
        script.write_text(text)
        argv = ["sbatch", "--parsable", f"--output={out}", f"--error={err}", *flags, script]
        submitted = self.command(argv, **options)
        if submitted.returncode != 0:
            return submitted
        code = self._await_job(submitted.stdout.split(";")[0].strip(), timeout_s)
        return Finished(submitted.argv, code, _text(out), _text(err))

    def logs(self) -> str:
        """The last lines that every daemon wrote."""
        parts = []
        for path in sorted(self.root.glob("*.log")):
            parts += [f"--- {path.name}", *_text(path).splitlines()[-15:]]
        return "\n".join(parts)

    # -- jobs and daemons -----------------------------------------------------------------------

    def _await_job(self, job: str, timeout_s: float) -> int:
        """Exit code of a job. (`sbatch --wait` looks only every few seconds.)"""
        deadline = time.monotonic() + timeout_s
        while True:
            said = self.command(["scontrol", "--oneliner", "show", "job", job]).ok().stdout
            fields = dict(word.split("=", 1) for word in said.split() if "=" in word)
            if fields["JobState"] in ENDED_STATES:
                code, number = map(int, fields["ExitCode"].split(":"))
                return code or (128 + number if number else 0)
            if time.monotonic() > deadline:
                self.command(["scancel", "--full", "--signal=KILL", job])
                raise ClusterError(f"job {job} not done after {timeout_s} s: {said}\n{self.logs()}")
            time.sleep(0.1)

    def _start(self) -> None:
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start_daemons()
                return
            except ClusterError:  # most likely one of our ports was taken meanwhile
                if attempt == START_ATTEMPTS:
                    raise
                self._stop_daemons()

    def _start_daemons(self) -> None:
        (self.root / "state").mkdir(exist_ok=True)
        key = self.root / "munge.key"
        key.unlink(missing_ok=True)
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        (self.root / "slurm.conf").write_text(
            _config(self.root, [free_port() for _ in range(1 + len(NODES))])
        )
        munged = ["munged", "--foreground", "--force", "--num-threads=2", f"--key-file={key}"]
        munged += [f"--{name}-file={self.root}/munged.{name}" for name in ("pid", "seed")]
        munged += [f"--socket={self.root}/munge.sock", f"--log-file={self.root}/munged.log"]
        self._spawn("munged", munged)
        self._spawn("slurmctld", ["slurmctld", "-D", "-i"])
        for node in NODES:
            self._spawn(f"slurmd-{node}", ["slurmd", "-D", "-N", node])
        self._await_nodes()

    def _spawn(self, name: str, argv: list[str]) -> None:
        env = clean_environment(self.env) | {"PATH": program_path()}
        with (self.root / f"{name}.out.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    argv,
                    env=env,
                    cwd=self.root,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _await_nodes(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        said = "nothing"
        while time.monotonic() < deadline:
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended:
                raise ClusterError(f"ended at once: {ended}\n{self.logs()}")
            said = self.command(["sinfo", "--noheader", "--Node", "--format=%N %T"]).stdout
            if all(f"{node} idle" in said for node in NODES):
                return
            time.sleep(0.1)
        raise ClusterError(f"no idle nodes in {START_TIMEOUT_S} s but {said}\n{self.logs()}")

    def _stop_daemons(self) -> None:
        """End the daemons, then the steps and tasks that still carry our configuration's name."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(timeout=5)
            except subprocess.TimeoutExpired:
                processes.send([daemon.pid], signal.SIGKILL)
                daemon.wait()
        self._daemons.clear()
        processes.end_all(f"SLURM_CONF={self.root / 'slurm.conf'}")


def _config(root: Path, ports: list[int]) -> str:
    host = socket.gethostname().split(".")[0]
    settings = {
        "ClusterName": "loopback",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmctldPort": ports[0],
        "SlurmUser": getpass.getuser(),
        "SlurmdUser": getpass.getuser(),
        "AuthType": "auth/munge",
        "AuthInfo": f"socket={root}/munge.sock",
        "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
        "StateSaveLocation": f"{root}/state",
        "SlurmdSpoolDir": f"{root}/spool-%n",
        "SlurmctldPidFile": f"{root}/slurmctld.pid",
        "SlurmdPidFile": f"{root}/slurmd-%n.pid",
        "SlurmctldLogFile": f"{root}/slurmctld.log",
        "SlurmdLogFile": f"{root}/slurmd-%n.log",
        "PlugStackConfig": "/dev/null",
        "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU",
        "SlurmdParameters": "config_overrides",  # believe CPUs= below, not the hardware
        "SchedulerParameters": "batch_sched_delay=0",
        "ReturnToService": 2,
        # Ports follow from a job's id, and several clusters share this machine's loopback.
        "FirstJobId": 1 + secrets.randbelow(9_000),
        "KillWait": 5,
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS_PER_NODE}"
        for node, port in zip(NODES, ports[1:], strict=True)
    ]
    # Jobs share CPUs, so that one that is being cleaned up does not hold up the next test.
    lines += ["PartitionName=main Nodes=ALL Default=YES OverSubscribe=FORCE:4", ""]
    return "\n".join(lines)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
