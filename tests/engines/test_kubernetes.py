"""``--launcher kubernetes`` on pods of two nodes, by the official client: what a job gives, its end, its wait."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from jupyter_torchdist.client import Job
from jupyter_torchdist.client.drivers import DriverPool
from tests.cluster.cells import MEET, PATIENCE, SLEEP, kill_driver
from tests.cluster.cells import start as started
from tests.engines.jobs import AGAIN, COUNT, SAVE, asleep, said
from tests.engines.kubernetes_api import TOKEN, KubernetesApi
from tests.engines.kubernetes_pods import IMAGE
from tests.leaks import wait_until


def start(pool: DriverPool, source: str, options: str = "", names: dict[str, Any] | None = None) -> Job:
    """Two nodes with two ranks each, unless ``options`` say otherwise."""
    words = f"--launcher kubernetes --nodes 2 --ranks 4 -O image={IMAGE} {options}"
    return started(pool, source, words, names, python=None)


def test_ranks_of_two_pods_give_values_and_lines_beyond_the_end_of_a_driver(
    kubernetes_pool: DriverPool, notebook: dict[str, Any]
) -> None:
    exec("import torch\nweights = torch.zeros(3)", notebook)
    job = start(kubernetes_pool, COUNT, "-O cpus=4", names=notebook)
    assert wait_until(lambda: "line 10" in job.logs(3), PATIENCE), job.state.reason
    kill_driver(job)
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    for rank in range(4):
        assert f"rank {rank} on torchdist-{job.id}-1-{rank // 2} sum 6.0" in job.logs(rank)
        assert [line for line in job.logs(rank).splitlines() if "line" in line] == [f"line {n}" for n in range(60)]
    job.bring(notebook)
    assert notebook["weights"].tolist() == [6.0, 6.0, 6.0]
    assert job.value == 18.0


LOGIN = """\
#!/bin/sh
echo "asked for $WHO" >>asked
echo '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
  "status": {"token": "%s", "expirationTimestamp": "2026-01-01T00:00:00Z"}}'
"""


def test_the_users_file_is_beside_the_notebook_and_has_a_program_that_logs_in(
    kubernetes_pool: DriverPool, kubernetes: KubernetesApi, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As with clouds: the token is soon too old, so the program is asked again. Variables are set after the start."""
    kubernetes_pool.warm()
    (tmp_path / "login").write_text(LOGIN % TOKEN)
    (tmp_path / "login").chmod(0o755)
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "./login", "interactiveMode": "Never"}
    config = kubernetes.config.read_text()
    try:
        kubernetes.write_config(kubernetes.server, exec=program)
        (tmp_path / "kubeconfig").write_bytes(kubernetes.config.read_bytes())
    finally:
        kubernetes.config.write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", "kubeconfig")
    monkeypatch.setenv("WHO", "me")
    job = start(kubernetes_pool, MEET)
    monkeypatch.delenv("KUBECONFIG")
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason
    asked = (tmp_path / "asked").read_text().splitlines()
    assert len(asked) > 5 and set(asked) == {"asked for me"}, "the driver has the notebook's variables of now"


@pytest.mark.soak
def test_an_exception_of_a_rank_is_the_notebooks_own_over_an_older_protocol(
    kubernetes_pool: DriverPool, kubernetes: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "protocols", ["v4.channel.k8s.io"])
    job = start(kubernetes_pool, MEET + "if dist.get_rank() == 3:\n    raise ValueError('no good')\ndist.barrier()\n")
    assert job.wait(PATIENCE).state == "failed"
    assert job.state.reason == f"rank 3 on torchdist-{job.id}-1-1: ValueError: no good"
    with pytest.raises(ValueError, match="no good"):
        job.raise_for_state()


def test_a_job_waits_for_room_and_a_cancel_leaves_nothing(
    kubernetes_pool: DriverPool, kubernetes: KubernetesApi
) -> None:
    job = start(kubernetes_pool, SLEEP, "-O cpus=4")
    assert wait_until(lambda: asleep(job), PATIENCE), job.state.reason
    assert list(kubernetes.jobs) == [f"torchdist-{job.id}-1"]
    other = start(kubernetes_pool, SLEEP)
    assert wait_until(lambda: "Unschedulable" in said(other), PATIENCE), said(other)
    assert said(other).endswith(": Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.")
    for each in (other, job):
        each.interrupt()
        assert each.wait(PATIENCE).state == "cancelled"
    assert wait_until(lambda: not kubernetes.left()), kubernetes.left()


@pytest.mark.soak
def test_a_job_that_a_queue_holds_back_runs_when_it_is_admitted(
    kubernetes_pool: DriverPool, kubernetes: KubernetesApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubernetes, "suspends", True)
    job = start(kubernetes_pool, MEET, "--ranks 2")
    assert wait_until(lambda: "its queue has not admitted it yet" in said(job), PATIENCE), said(job)
    kubernetes.jobs[f"torchdist-{job.id}-1"]["spec"]["suspend"] = False
    assert job.wait(PATIENCE).state == "succeeded", job.state.reason


@pytest.mark.soak
def test_before_a_pod_is_deleted_the_ranks_can_save(kubernetes_pool: DriverPool, kubernetes: KubernetesApi) -> None:
    job = start(kubernetes_pool, SAVE, "--ranks 2")
    assert wait_until(lambda: asleep(job), PATIENCE), job.state
    with kubernetes.lock:
        kubernetes.delete(kubernetes.pod(1))  # as a node that is drained
    assert job.wait(PATIENCE).state == "timed_out"
    assert job.state.reason.startswith("Kubernetes ends its pods: they were deleted, evicted, ")
    assert job.logs(stream="out").count("saved") == 2


@pytest.mark.soak
def test_a_container_that_is_killed_ends_the_job_with_its_pod(
    kubernetes_pool: DriverPool, kubernetes: KubernetesApi
) -> None:
    job = start(kubernetes_pool, SLEEP, "--ranks 2")
    assert wait_until(lambda: asleep(job), PATIENCE), job.state
    name = kubernetes.pod(1).name
    kubernetes.pod(1).end(signal.SIGKILL)
    assert job.wait(PATIENCE).state == "lost"
    assert f"pod {name} on node1 has failed: Error, exit code " in job.state.reason


@pytest.mark.soak
def test_a_pod_that_is_lost_is_followed_by_a_new_job(kubernetes_pool: DriverPool, kubernetes: KubernetesApi) -> None:
    job = start(kubernetes_pool, AGAIN, "--ranks 2 --restarts 1 --grace 1s")
    assert wait_until(lambda: job.logs(stream="out").count("start 0") == 2, PATIENCE), job.state
    name = kubernetes.pod(1).name
    kubernetes.pod(1).end(signal.SIGKILL)
    assert job.wait(2 * PATIENCE).state == "succeeded", job.state.reason
    assert job.value == 1
    assert any(f"pod {name} on node1 has failed" in note for note in job.state.notes), job.state.notes
    assert f"rank 1 on torchdist-{job.id}-2-1" in job.logs(1)


@pytest.mark.soak
def test_a_job_that_somebody_deletes_says_so(kubernetes_pool: DriverPool, kubernetes: KubernetesApi) -> None:
    job = start(kubernetes_pool, SLEEP, "--ranks 2 --grace 1s")
    assert wait_until(lambda: asleep(job), PATIENCE), job.state
    with kubernetes.lock:
        kubernetes.remove(f"torchdist-{job.id}-1")
    assert job.wait(PATIENCE).state in ("timed_out", "lost", "failed")
    assert "deleted" in job.state.reason
