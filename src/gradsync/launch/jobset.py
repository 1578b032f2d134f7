"""A Kubernetes job as a checked value, and its JobSet as text. Pure.

    NAME                a headless service: each pod is reached as NAME-node-0-INDEX.NAME
    NAME-node-0-INDEX   one pod a node, of one Indexed Job; INDEX is the node's rank

[Note: one agent a pod]
Each pod runs `gradsync launch`, which is the elastic agent that torchrun runs, with exit codes:
torchrun turns every failure into 1. So the code of a request that cannot be right, 2, ends the
JobSet at once (`podFailurePolicy` fails the Job for a reason of its own, by which `failurePolicy`
knows it); whatever else ends a pod, 75 among it, starts all pods again, which go on from the last
checkpoint. Fields: jobset.x-k8s.io/v1alpha2 and batch/v1.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

import tyro

from gradsync.core.files import counted
from gradsync.launch.request import LaunchPlan, Program
from gradsync.launch.sbatch import JobRequest, require, seconds_of

_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LONGEST_POD_NAME = 63
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]{0,511}")
_VOLUME = re.compile(rf"({_NAME.pattern}):(/[^:]*)")
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_NO_TEXTS = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
_OF_SLURM = (
    *("partition", "account", "qos", "array", "launcher", "module", "setup", "sbatch_arg"),
    *("output", "run_dir", "fruitless_turns"),
)
_JOB, _RANKS = "node", "ranks"
_START_S = 3600.0
"""How long pods wait for each other, seconds: nodes may have to be made first, images pulled."""
_SHM = {"name": "shm", "emptyDir": {"medium": "Memory"}}
"""Volume for /dev/shm: a container has 64 MiB of it otherwise; NCCL and data loaders take more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesRequest(JobRequest):
    """A job's flags, and Kubernetes' own."""

    image: str = ""
    """Kubernetes: image of the pods, with gradsync in it."""
    volume: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Kubernetes: CLAIM:/PATH, a claim for storage that all pods share; may be given several times.
    What pods write elsewhere is lost with them."""
    max_restarts: int = 10
    """Kubernetes: start all pods again so often after a failure or a preemption."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsetPlan(KubernetesRequest):
    """One JobSet. Wrong requests are refused when it is made."""

    program: Program  # command of each rank
    python: str = "python"  # interpreter in the image

    def __post_init__(self) -> None:
        self.check_numbers()
        for field in fields(JobRequest):
            if field.name in _OF_SLURM:
                require(
                    getattr(self, field.name) == field.default,
                    f"--{field.name.replace('_', '-')} is of Slurm's jobs; drop it, or --to k8s",
                )
        require(self.max_restarts >= 0, f"--max-restarts must be at least 0; {self.max_restarts}")
        longest = _LONGEST_POD_NAME - len(f"-{_JOB}-0-{self.nodes - 1}-xxxxx")
        require(
            _LABEL.fullmatch(self.job_name) is not None and len(self.job_name) <= longest,
            f"--job-name must be 1 to {longest} small letters, digits or dashes, a letter first; "
            f"got {self.job_name[:80]!r}",
        )
        require(
            _IMAGE.fullmatch(self.image) is not None,
            f"--image must name the pods' image, with gradsync in it; got {self.image[:80]!r}",
        )
        for volume in self.volume:
            require(
                _VOLUME.fullmatch(volume) is not None and volume.isprintable(),
                f"--volume must look like CLAIM:/PATH; got {volume[:80]!r}",
            )
        for word in (self.python, *self.program.words):
            require("\0" not in word, "an argument holds a zero byte; no program can get it")
        seconds_of(self.time or "1")

    @property
    def secret(self) -> str:
        """Name of the Secret with the token by which ranks on several nodes know each other."""
        return f"{self.job_name}-token" if self.nodes > 1 else ""


def jobset_text(plan: JobsetPlan) -> str:
    """The manifest for `plan`, as `kubectl apply -f` takes it."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Quotes each text that some reader of YAML takes for something else (3e-4, 1_000, y)."""

    def represent(dumper: Any, text: str) -> Any:
        plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _NO_TEXTS
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')

    Dumper.add_representer(str, represent)
    each = counted(plan.ranks_per_node, "rank") + (", one a GPU" if plan.gpus_per_node else "")
    notes = [f"{plan.job_name}: {counted(plan.nodes, 'pod')}, one a node, with {each}."]
    notes += ["Written by `gradsync submit --to k8s`; `kubectl apply -f` takes it as it is."]
    if plan.secret:
        token = "--from-literal=token=$(openssl rand -hex 32)"
        notes += ["Before it, anew for each job:"]
        notes += [f"kubectl create secret generic {plan.secret} {token}"]
    if not plan.volume:
        notes += ["No --volume: checkpoints are lost with their pod, and a restart begins anew."]
    lines = [f"# {line}\n" for line in notes]
    document = yaml.dump(jobset(plan), Dumper=Dumper, sort_keys=False, width=10**6)
    return "".join(lines) + document


def jobset(plan: JobsetPlan) -> dict[str, Any]:
    """The JobSet as a document."""
    usage = {"containerName": _RANKS, "operator": "In", "values": [2]}
    job = {
        "completionMode": "Indexed",
        "completions": plan.nodes,
        "parallelism": plan.nodes,
        "backoffLimit": 0,  # one pod's failure is the Job's: ranks go on together or not at all
        **({"activeDeadlineSeconds": seconds_of(plan.time)} if plan.time else {}),
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": usage}]},
        "template": {"spec": _pod(plan)},
    }
    rule = {"name": "usage", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": plan.job_name},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": plan.max_restarts, "rules": [rule]},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod(plan: JobsetPlan) -> dict[str, Any]:
    claims = [volume.partition(":") for volume in plan.volume]
    mounts = [{"name": f"volume-{i}", "mountPath": path} for i, (_, _, path) in enumerate(claims)]
    volumes = [
        {"name": f"volume-{i}", "persistentVolumeClaim": {"claimName": claim}}
        for i, (claim, _, _) in enumerate(claims)
    ]
    token = {"secretKeyRef": {"name": plan.secret, "key": "token"}}
    wanted = {
        "nvidia.com/gpu": plan.gpus_per_node,
        "cpu": (plan.cpus_per_task or 0) * plan.ranks_per_node,
        "memory": _quantity(plan.mem),
    }
    limits = {name: value for name, value in wanted.items() if value}
    container = {
        "name": _RANKS,
        "image": plan.image,
        "command": _command(plan),
        "env": [{"name": "GRADSYNC_TOKEN", "valueFrom": token}] if plan.secret else [],
        "resources": {"limits": limits} if limits else {},
        "volumeMounts": [{"name": _SHM["name"], "mountPath": "/dev/shm"}, *mounts],
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": plan.warn_s,  # from SIGTERM on, to save
        **({"affinity": _apart(plan)} if plan.nodes > 1 else {}),
        "containers": [{name: value for name, value in container.items() if value}],
        "volumes": [_SHM, *volumes],
    }


def _apart(plan: JobsetPlan) -> dict[str, Any]:
    """No two pods of the job on a node."""
    ours = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": plan.job_name}}
    term = {"labelSelector": ours, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _command(plan: JobsetPlan) -> list[str]:
    """The pod's command, which no shell touches. Kubernetes replaces $(NAME) by a variable's value
    and $$ by $; only the pod's index is one."""
    name = plan.job_name
    launch = LaunchPlan(
        program=plan.program,
        nproc_per_node=plan.ranks_per_node,
        nnodes=plan.nodes,
        master_addr=f"{name}-{_JOB}-0-0.{name}" if plan.nodes > 1 else "",
        wait_s=_START_S,
    )
    index = "\0"  # in no other word
    words = [plan.python, "-m", "gradsync", *launch.words(index)]
    return [w.replace("$", "$$").replace(index, "$(JOB_COMPLETION_INDEX)") for w in words]


def _quantity(mem: str) -> str:
    """Slurm's memory, in powers of two and MiB by default, as Kubernetes writes it."""
    return f"{mem}i" if mem[-1:].isalpha() else f"{mem}Mi" if mem else ""
