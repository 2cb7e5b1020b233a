"""docs/kuberay.yaml: its fields are among those of KubeRay (ray-operator/apis/ray/v1), and its command is ours."""

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with Ray")

PATH = Path(__file__).parents[2] / "docs" / "kuberay.yaml"
JOB = {
    "activeDeadlineSeconds", "backoffLimit", "clusterSelector", "deletionStrategy", "entrypoint", "entrypointNumCpus",
    "entrypointNumGpus", "entrypointResources", "jobId", "managedBy", "metadata", "rayClusterSpec", "runtimeEnvYAML",
    "shutdownAfterJobFinishes", "submissionMode", "submitterConfig", "submitterPodTemplate", "suspend",
    "ttlSecondsAfterFinished",
}  # fmt: skip
CLUSTER = {
    "authOptions", "autoscalerOptions", "enableInTreeAutoscaling", "headGroupSpec", "headServiceAnnotations",
    "rayVersion", "suspend", "workerGroupSpecs",
}  # fmt: skip
HEAD = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
WORKERS = {
    "groupName", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams", "replicas", "scaleStrategy", "template",
}  # fmt: skip


@pytest.fixture(scope="module")
def manifest():
    found, _ = yaml.safe_load_all(PATH.read_text())
    return found


def test_ray_asks_for_a_token_and_only_pods_of_the_cluster_and_kuberay_reach_it(manifest):
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert [*map(int, cluster["rayVersion"].split("."))] >= [2, 52, 0]
    _, policy = yaml.safe_load_all(PATH.read_text())
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchExpressions"] == [{"key": "ray.io/cluster", "operator": "Exists"}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert all(each["podSelector"] for rule in policy["spec"]["ingress"] for each in rule["from"])


def test_the_fields_are_those_of_a_ray_job(manifest):
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    job = manifest["spec"]
    cluster = job["rayClusterSpec"]
    assert job.keys() <= JOB
    assert cluster.keys() <= CLUSTER
    assert {"rayStartParams", "template"} <= cluster["headGroupSpec"].keys() <= HEAD
    needed = {"groupName", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    for group in cluster["workerGroupSpecs"]:
        assert needed <= group.keys() <= WORKERS
        assert 0 < group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(each["value"], str) for each in container["env"])
        assert container["resources"]["limits"] == container["resources"]["requests"]  # Kubernetes asks it of GPUs
        assert all(isinstance(amount, str) for amount in container["resources"]["limits"].values())
