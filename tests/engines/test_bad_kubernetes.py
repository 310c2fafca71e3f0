"""``--launcher kubernetes`` with what it cannot do: each refusal in words, most of them before a job is made."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import MEET, PATIENCE
from tests.engines import jobs
from tests.engines.jobs import said
from tests.engines.kubernetes_api import CERTIFICATE, KIND, KubernetesApi
from tests.engines.kubernetes_pods import IMAGE
from tests.engines.ray_cluster import free_ports
from tests.engines.test_kubernetes import start
from tests.leaks import wait_until

planned = partial(jobs.planned, f"kubernetes -O image={IMAGE}")
refusal = partial(jobs.refusal, f"kubernetes -O image={IMAGE}")


def test_without_the_client_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    said = refusal("--ranks 2")
    assert f"the package kubernetes, which is not installed in {sys.executable}" in said
    assert "pip install 'jupyter_torchdist[kubernetes]'" in said


client_is_here = pytest.mark.skipif(find_spec("kubernetes") is None, reason="kubernetes is not installed here: make")


@client_is_here
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ranks 2 --hosts a,b", "Kubernetes chooses the nodes"),
        ("--ranks 2 -O namespace=My_Team", "-O namespace=My_Team: expected lower-case letters, digits and hyphens"),
        ("--ranks 2 -O mem=64GB", "-O mem=64GB: expected a size such as 64Gi"),
        ("--ranks 2 -O cpus=0", "-O cpus=0: expected a whole number"),
    ],
)
def test_options_that_kubernetes_does_not_take(options: str, message: str) -> None:
    assert message in refusal(options)


@client_is_here
def test_an_image_is_needed() -> None:
    said = jobs.refusal("kubernetes", "--ranks 2")
    assert "which image the pods have is not known → -O image=NAME names one that has Python 3.10" in said


@client_is_here
def test_a_cluster_that_does_not_answer_is_named_with_where_it_comes_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    said = refusal("--ranks 2")
    assert "no Kubernetes cluster answers (the current context of your kubeconfig): Invalid kube-config file" in said
    (port,) = free_ports(1)
    api = KubernetesApi.__new__(KubernetesApi)
    api.directory, api.config = tmp_path, tmp_path / "config"
    (tmp_path / CERTIFICATE).touch()
    api.write_config(f"http://127.0.0.1:{port}")
    monkeypatch.setenv("KUBECONFIG", str(api.config))
    said = refusal("--ranks 2")
    assert "Connection refused" in said and "`kubectl cluster-info` says whether the cluster answers" in said
    said = refusal("--ranks 2 -O context=other")
    assert "no Kubernetes cluster answers (-O context=other): " in said and "other" in said


def test_more_than_the_cluster_has_is_refused(kubernetes: KubernetesApi) -> None:
    where = f"the cluster at {kubernetes.server}"
    assert f"--nodes 3: {where} has 2 nodes → --nodes 2" in refusal("--nodes 3 --ranks 6")
    assert f"--gpus 8: 2 nodes of {where} have 2 each → --gpus 4" in refusal("--nodes 2 --gpus 8")
    assert f"--gpus 4: 1 node of {where} has 2 → --gpus 2, or --nodes 2" in refusal("--gpus 4")
    assert f"no node of {where} has a GPU H100: {KIND}" in refusal("--gpus 1 --gpu-type H100")
    assert f"the nodes of {where} have no GPUs → -O gpu=NAME" in refusal("--gpus 1 -O gpu=amd.com/gpu")
    assert "has 4 CPUs for a job → -O cpus=4" in refusal("--ranks 2 -O cpus=5")
    assert "-O partition is an option of --launcher slurm, not of kubernetes" in refusal("--ranks 2 -O partition=a")
    assert "has no option 'images' → did you mean -O image=…?" in refusal("--ranks 2 -O images=a")


def test_a_user_who_may_not_list_nodes_says_what_a_node_has(
    kubernetes: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "forbidden", {"nodes"})
    assert "because you may not list nodes → --gpus N with --nodes N" in refusal("--nodes 2")
    assert [len(node.gpus) for node in planned("--nodes 2 --gpus 4").plan.nodes] == [2, 2]
    assert pod_of(planned("--nodes 2 --ranks 4").plan.request)["resources"] == {"requests": {"cpu": "2"}, "limits": {}}


def test_what_a_user_may_not_do_is_said_in_the_words_of_the_api(
    kubernetes: KubernetesApi, kubernetes_pool: DriverPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "forbidden", {"jobs"})
    words = 'jobs is forbidden: User "me" cannot create resource "jobs"'
    assert f"Kubernetes refuses the job: {words} → " in refusal("--ranks 2")
    monkeypatch.setattr(kubernetes, "forbidden", {"pods/exec"})
    job = start(kubernetes_pool, MEET, "--ranks 2")
    assert job.wait(PATIENCE).state == "failed"
    assert 'pods/exec is forbidden: User "me" cannot get resource "pods/exec"' in job.state.reason
    monkeypatch.setattr(kubernetes, "forbidden", set())
    config = kubernetes.config.read_text()
    try:
        kubernetes.write_config(kubernetes.server, token="old")
        assert "(the current context of your kubeconfig): Unauthorized" in refusal("--ranks 2")
        failing = {"apiVersion": "client.authentication.k8s.io/v1", "command": "false", "interactiveMode": "Never"}
        kubernetes.write_config(kubernetes.server, exec=failing)
        assert "Unauthorized (exec: process returned 1" in refusal("--ranks 2")
    finally:
        kubernetes.config.write_text(config)


def test_why_pods_do_not_start_is_said_and_a_cancel_takes_the_job_back(
    kubernetes: KubernetesApi, kubernetes_pool: DriverPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(kubernetes_pool, MEET, "-O image=nowhere/none:1")
    assert wait_until(lambda: 'ImagePullBackOff: Back-off pulling image "nowhere/none:1"' in said(job), PATIENCE)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not kubernetes.left()), kubernetes.left()
    monkeypatch.setattr(kubernetes, "quota", 1)
    job = start(kubernetes_pool, MEET)
    assert wait_until(lambda: "exceeded quota: pods=1" in said(job), PATIENCE), said(job)
    job.interrupt()
    assert job.wait(PATIENCE).state == "cancelled"


@pytest.mark.soak
def test_an_image_without_the_python_ends_the_job_with_words(kubernetes_pool: DriverPool) -> None:
    job = start(kubernetes_pool, MEET, "--ranks 2 --host-option python=/nowhere/python")
    assert job.wait(PATIENCE).state == "failed"
    assert "has no Python at /nowhere/python" in job.state.reason


def test_the_plan_shows_the_job_laid_over_the_users_template(kubernetes: KubernetesApi, tmp_path: Path) -> None:
    template = tmp_path / "pod.yaml"
    mount = {"name": "data", "mountPath": "/data"}
    template.write_text(
        yaml.safe_dump(
            {
                "metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}},
                "spec": {
                    "tolerations": [{"key": "gpu", "operator": "Exists"}],
                    "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
                    "containers": [{"name": "mine", "env": [{"name": "A", "value": "b"}], "volumeMounts": [mount]}],
                },
            }
        )
    )
    plan = planned(f"--nodes 2 --gpus 4 -O mem=64Gi -O cpus=3 -O template={template} --grace 20s").plan
    job = yaml.safe_load(plan.request)
    assert job["metadata"]["namespace"] == "ml"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    pod = job["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": KIND}
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 50)
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert [volume["name"] for volume in pod["volumes"]] == ["data", "torchdist-shm"]
    container = pod_of(plan.request)
    assert container["resources"] == {
        "requests": {"cpu": "3", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "2"},
    }
    assert container["name"] == "node"
    assert container["env"][0] == {"name": "A", "value": "b"}
    assert container["volumeMounts"] == [mount, {"name": "torchdist-shm", "mountPath": "/dev/shm"}]
    assert not kubernetes.jobs, "nothing was made"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file or directory"),
        ("[1, 2", "while parsing"),
        ("kind: Pod", "there is no `spec`"),
        ("spec: {containers: [{name: node}], tolerationz: []}", "spec.template.spec.tolerationz: Extra inputs are not"),
    ],
)
def test_a_template_that_is_none(kubernetes: KubernetesApi, tmp_path: Path, text: str | None, message: str) -> None:
    template = tmp_path / "pod.yaml"
    if text is not None:
        template.write_text(text)
    assert message in refusal(f"--ranks 2 -O template={template}")


def pod_of(request: str) -> dict[str, Any]:
    """The container of our pods."""
    found: dict[str, Any] = yaml.safe_load(request)["spec"]["template"]["spec"]["containers"][0]
    return found
