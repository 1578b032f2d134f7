"""JobSets: their text, the fields that Kubernetes has, what is refused, words as they arrive."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradsync.cli.launch import LaunchOptions, plan_of, split
from gradsync.cli.main import main
from gradsync.errors import ConfigError
from gradsync.launch import agent
from gradsync.launch.agent import AgentRendezvous
from gradsync.launch.jobset import JobsetPlan, jobset, jobset_text
from gradsync.launch.request import LaunchPlan, parse_program
from gradsync.runtime.arguments import parse
from support.requirements import require

GOLDEN = Path(__file__).parent / "golden"


def plan(*words: str, **changes: Any) -> JobsetPlan:
    values = {"job_name": "mini", "image": "registry.example/train:1"} | changes
    return JobsetPlan(program=parse_program(words or ["train", "mini"]), **values)


PLANS = {
    "gpu_pods": plan(
        *("train", "xl", "--optim.lr", "3e-4", "--out", "/runs/my xl"),
        nodes=2,
        gpus_per_node=4,
        cpus_per_task=8,
        mem="200G",
        time="3-00",
        volume=("runs:/runs", "corpus:/data"),
        warn_s=300,
        max_restarts=50,
    ),
    "bare_pod": plan("my_script.py", "$(reboot)", "$$x", 'a "b"\n', "1_000", "y", "", "é"),
}

# -- the published schemas, as far as a manifest of ours goes --------------------------------------
# A name with ! is required; a list has its items' schema; a pattern or a type stands for a value.
# jobset.x-k8s.io/v1alpha2 (its CRD and webhook), batch/v1 JobSpec, core/v1 PodSpec; those two are
# also held to the models of Kubernetes' own client, below.

LABEL = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
EXIT_CODES = {"containerName": LABEL, "operator!": "In|NotIn", "values!": [int]}
TERM = {"labelSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": LABEL}}}
SECRET = {"name": LABEL, "key!": r"[-._a-zA-Z0-9]+"}
CONTAINER = {
    "name!": LABEL,
    "image!": r"\S+",
    "command": [str],
    "env": [{"name!": r"[A-Z_]+", "valueFrom": {"secretKeyRef": SECRET}}],
    "resources": {"limits": {"nvidia.com/gpu": int, "cpu": int, "memory": r"\d+[KMGT]i"}},
    "volumeMounts": [{"name!": LABEL, "mountPath!": r"/[^:]*"}],
}
VOLUME = {
    "name!": LABEL,
    "emptyDir": {"medium": "|Memory"},
    "persistentVolumeClaim": {"claimName!": r"[a-z0-9.-]+"},
}
POD = {
    "restartPolicy": "Never",  # a pod failure policy takes no other
    "terminationGracePeriodSeconds": int,
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [TERM | {"topologyKey!": r"\S+"}]
        }
    },
    "containers!": [CONTAINER],
    "volumes": [VOLUME],
}
JOB = {
    "completionMode": "Indexed|NonIndexed",
    **dict.fromkeys(("completions", "parallelism", "backoffLimit", "activeDeadlineSeconds"), int),
    "podFailurePolicy": {
        "rules!": [{"action!": "FailJob|FailIndex|Ignore|Count", "onExitCodes": EXIT_CODES}]
    },
    "template!": {"spec": POD},
}
REASONS = "BackoffLimitExceeded|DeadlineExceeded|FailedIndexes|MaxFailedIndexesExceeded"
RULE = {
    "name!": r"[A-Za-z]([A-Za-z0-9_,:]{0,126}[A-Za-z0-9_])?",
    "action!": "FailJobSet|RestartJobSet|RestartJobSetAndIgnoreMaxRestarts",
    "onJobFailureReasons": [f"{REASONS}|PodFailurePolicy"],
}
JOBSET = {
    "apiVersion!": r"jobset\.x-k8s\.io/v1alpha2",
    "kind!": "JobSet",
    "metadata!": {"name!": LABEL},
    "spec!": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
        "failurePolicy": {"maxRestarts": int, "rules": [RULE]},
        "replicatedJobs": [{"name!": LABEL, "replicas": int, "template!": {"spec": JOB}}],
    },
}


def check(value: Any, schema: Any, path: str) -> None:
    """Fail with the path of the first field that the schema does not have so."""
    if isinstance(schema, Mapping):
        assert isinstance(value, dict), path
        known = {name.removesuffix("!"): inner for name, inner in schema.items()}
        assert value.keys() <= known.keys(), path
        assert {name[:-1] for name in schema if name.endswith("!")} <= value.keys(), path
        for name, each in value.items():
            check(each, known[name], f"{path}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for place, each in enumerate(value):
            check(each, schema[0], f"{path}[{place}]")
    elif isinstance(schema, type):
        assert type(value) is schema, path
    else:
        assert isinstance(value, str), path
        assert re.fullmatch(schema, value), f"{path}: {value!r} is not {schema}"


@pytest.mark.parametrize("name", PLANS)
def test_the_text_is_a_jobset(name: str) -> None:
    """Run this file as a program to write the golden files anew; then read them."""
    text = jobset_text(PLANS[name])
    assert text == (GOLDEN / f"{name}.yaml").read_text()
    document = yaml.safe_load(text)
    assert document == jobset(PLANS[name])
    check(document, JOBSET, "")

    (job,) = document["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert len(f"{document['metadata']['name']}-{job['name']}-0-{spec['completions']}-abcde") <= 63
    (rule,) = spec["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}
    assert spec["completions"] == spec["parallelism"] == PLANS[name].nodes


@pytest.mark.parametrize("name", PLANS)
def test_each_job_has_only_fields_that_kubernetes_publishes(name: str) -> None:
    """By the models of its Python client, which are made from its OpenAPI document."""
    require("kubernetes")
    from kubernetes.client import V1JobTemplateSpec

    (job,) = yaml.safe_load(jobset_text(PLANS[name]))["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    resources = container.get("resources", {})  # quantities, which may be numbers
    resources.update({kind: {n: str(v) for n, v in of.items()} for kind, of in resources.items()})

    def as_published(template: dict[str, Any]) -> dict[str, Any]:
        model = V1JobTemplateSpec.from_dict(template)
        return model.model_dump(by_alias=True, exclude_none=True)

    assert as_published(job["template"]) == job["template"]
    container["imagePolicy"] = "Always"
    assert as_published(job["template"]) != job["template"], "unknown fields are left out"


def arrived(words: list[str], index: int) -> list[str]:
    """The command of pod `index` as its kernel gets it, by Kubernetes' rules of expansion."""
    values = {"$$": "$", "$(JOB_COMPLETION_INDEX)": str(index)}
    return [re.sub(r"\$\$|\$\(\w+\)", lambda found: values[found[0]], word) for word in words]


@pytest.mark.parametrize("name", PLANS)
def test_each_pod_launches_its_ranks(name: str) -> None:
    given = PLANS[name]
    (job,) = jobset(given)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    for index in range(given.nodes):
        python, *words = arrived(container["command"], index)
        assert [python, *words[:3]] == ["python", "-m", "gradsync", "launch"]
        own, program = split(words[3:])
        got = plan_of(parse(LaunchOptions, own, "launch"), parse_program(program))
        assert got.program == given.program
        assert got.world_size == given.nodes * given.ranks_per_node
        if given.nodes > 1:
            assert (got.node_rank, got.master_addr) == (index, "mini-node-0-0.mini")


def test_text_that_other_readers_of_yaml_take_for_numbers_is_quoted() -> None:
    text = jobset_text(PLANS["bare_pod"]) + jobset_text(PLANS["gpu_pods"])
    assert all(f'- "{word}"\n' in text for word in ("3e-4", "1_000", "y", "", "4"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": ""}, "--image must name the pods' image"),
        ({"image": "a b"}, "--image must name"),
        ({"job_name": "Mini"}, "--job-name must be 1 to 48 small letters"),
        ({"job_name": "m" * 49}, "--job-name must be 1 to 48 small letters"),
        ({"volume": ("runs",)}, "--volume must look like CLAIM:/PATH"),
        ({"volume": ("runs:/a\nb",)}, "--volume must look like CLAIM:/PATH"),
        ({"partition": "gpu"}, "--partition is of Slurm's jobs"),
        ({"sbatch_arg": ("--x",)}, "--sbatch-arg is of Slurm's jobs"),
        ({"gpus_per_node": 4, "ntasks_per_node": 8}, "two ranks would share a GPU"),
        ({"mem": "64 GB"}, "--mem must be a number"),
        ({"max_restarts": -1}, "--max-restarts must be at least 0"),
        ({"time": "tomorrow"}, "--time must be MINUTES"),
        ({"python": "a\0b"}, "zero byte"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plan(**changes)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--to", "k8s", "--image", "train:1", "--nodes", "2"]
    words = ["train", "tiny", "--steps", "5", "--out=/runs/first"]
    assert main(["submit", *flags, "--", *words]) == 0
    text = capsys.readouterr().out
    (job,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-6:] == ["train", "tiny", "--steps", "5", "--out", "/runs/first"]
    assert "secret generic tiny-token" in text
    assert main(["submit", *flags, "--json", "--", *words]) == 0
    assert json.loads(capsys.readouterr().out)["script"] == text
    for wrong, said in (
        ([*flags, "--wait", "--", "train"], "--wait follows a Slurm job"),
        ([*flags, "--", "train", "--stps", "5"], "--steps"),
        (["--image", "x", "--time", "60", "--", "train"], "--image needs --to k8s"),
    ):
        with suppress(SystemExit):
            assert main(["submit", *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_name_that_is_not_known_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([OSError("no such name"), OSError("no such name"), None])

    def lookup(name: str, port: None) -> None:
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(agent, "_KNOCK_S", 0.0)
    monkeypatch.setattr(agent.socket, "getaddrinfo", lookup)
    hosted = []
    monkeypatch.setattr(agent, "host_store", lambda *a, **k: hosted.append(next(answers, "all")))
    first = LaunchPlan(
        program=parse_program(["train"]),
        **{"nproc_per_node": 1, "nnodes": 2, "node_rank": 0, "master_addr": "a-node-0-0.a"},
    )
    AgentRendezvous(first)._open(first, float("inf"))
    assert hosted == ["all"]
    assert capsys.readouterr().err.count("a-node-0-0.a does not resolve; trying for 60 s") == 1


if __name__ == "__main__":
    for _name, _plan in PLANS.items():
        (GOLDEN / f"{_name}.yaml").write_text(jobset_text(_plan))
