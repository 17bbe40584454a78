"""The manifest that scripts/k8s makes: as Kubernetes' schemas want it, and as ftrain reads it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from ftrain.config import load_config
from ftrain.schedulers import read_kubernetes
from tests.kubernetes.structural import problems
from tests.runs import REPOSITORY, environment

SCHEMA = json.loads((REPOSITORY / "tests/kubernetes/jobset_v1alpha2.json").read_text())
ARGUMENTS = ("--image", "registry.example/digits:1", "--nodes", "2", "--claim", "runs")
CPU = ("--set", "cluster.platform=cpu")


def render(*arguments: str, config: str = "configs/digits.yaml") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "scripts/k8s/render.py", config, *arguments],
        cwd=REPOSITORY,
        env=environment(),
        text=True,
        capture_output=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


def manifest(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the JobSet."""
    code, text, why = render(*ARGUMENTS, *arguments)
    assert code == 0, why
    return tuple(yaml.safe_load_all(text))


def pod(jobset: dict[str, Any]) -> dict[str, Any]:
    return jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_the_jobset_is_what_its_published_schema_wants():
    """With and without GPUs; a field it does not know would be dropped without a word."""
    for more in (CPU, ("--set", "cluster.platform=gpu")):
        _, jobset = manifest(*more)
        assert list(problems(jobset, SCHEMA)) == []


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda s: s["spec"]["network"].update(enableDnsHostnames=True), "unknown field enableDns"),
        (lambda s: s["spec"]["replicatedJobs"][0].pop("template"), "no template"),
        (
            lambda s: s["spec"]["failurePolicy"]["rules"][0].update(action="Fail"),
            "'Fail' is not one",
        ),
        (lambda s: pod(s).update(terminationGracePeriodSeconds="35"), "'35' is no integer"),
        (lambda s: pod(s)["containers"][0].update(resources={"limits": {"cpu": []}}), "neither"),
        (lambda s: pod(s)["containers"][0]["env"][0].pop("name"), "env[0]: no name"),
        (lambda s: pod(s)["volumes"][2]["emptyDir"].update(sizeLimit="2 Gi"), "does not match"),
    ],
)
def test_a_broken_jobset_is_seen(break_it, said):
    """The validation itself."""
    _, jobset = manifest(*CPU)
    broken = copy.deepcopy(jobset)
    break_it(broken)
    assert said in "\n".join(problems(broken, SCHEMA))


def test_a_pod_of_it_finds_its_place_and_the_head():
    """By what the manifest sets and what Kubernetes adds: names of JobSet's pods and services."""
    _, jobset = manifest(*CPU, "--name", "my-run")
    job = jobset["spec"]["replicatedJobs"][0]
    given = {e["name"]: e["value"] for e in pod(jobset)["containers"][0]["env"]}
    hostname = f"{jobset['metadata']['name']}-{job['name']}-0-1"
    found = read_kubernetes({**given, "HOSTNAME": hostname, "JOB_COMPLETION_INDEX": "1"})
    spec = job["template"]["spec"]
    assert found.nodes == spec["completions"] == spec["parallelism"] == 2
    assert (found.node_rank, found.head) == (1, "my-run-worker-0-0.my-run")
    assert jobset["spec"]["network"]["enableDNSHostnames"] is True


def test_exit_codes_mean_what_ftrain_says_they_mean():
    """75 is tried again for nothing, 2 and 3 end it; the first rule that fits counts."""
    _, jobset = manifest(*CPU)
    spec = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in reversed(rules)
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {2: "FailJob", 3: "FailJob", 75: "Ignore"}
    container = pod(jobset)["containers"][0]["name"]
    assert {r["onExitCodes"]["containerName"] for r in rules if "onExitCodes" in r} == {container}
    assert pod(jobset)["restartPolicy"] == "Never"


def test_the_config_travels_with_it_and_its_grace_is_kept():
    """Resolved, with what was set, and in the volume that outlives the pods."""
    more = ("--set", "grace_s=60.5", "--set", "steps=7", *CPU)
    settings, jobset = manifest(*more)
    path = REPOSITORY / "configs/digits.yaml"
    sets = [item for item in more if item != "--set"]
    expected = load_config(path, sets, "/runs/digits")
    assert settings["data"]["config.yaml"] == expected.to_yaml()
    assert pod(jobset)["terminationGracePeriodSeconds"] == 71
    assert pod(jobset)["containers"][0]["command"][2] == "/etc/ftrain/config.yaml"


def test_a_pod_has_the_gpus_of_its_workers():
    """Of four workers on two pods, two each."""
    _, jobset = manifest("--set", "cluster.platform=gpu")
    resources = pod(jobset)["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "2"
    _, jobset = manifest(*CPU)
    assert "nvidia.com/gpu" not in pod(jobset)["containers"][0]["resources"]["limits"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "platform: auto, and a manifest says"),
        ((*CPU, "--nodes", "5"), "--nodes 5 with cluster.workers=4"),
        ((*CPU, "--name", "My_Run"), "name My_Run: pods are called My_Run-worker-0-1"),
        ((*CPU, "--name", "x" * 60), "63 at most"),
        ((*CPU, "--run-dir", "/tmp/x"), "run_dir /tmp/x is not below /runs"),
        ((*CPU, "--image", 'a"b'), "is no image's name"),
        (("--set", "cluster.workers=x"), "--set cluster.workers=x: "),
    ],
)
def test_what_would_not_run_is_refused(more, said):
    """In one line, before anything is applied."""
    code, text, why = render(*ARGUMENTS, *more)
    assert (code, text) == (2, "")
    assert said in why
