"""docs/kuberay.yaml keeps Ray to the pods of its own cluster."""

from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with Ray")

PATH = Path(__file__).parents[2] / "docs" / "kuberay.yaml"


def test_ray_asks_for_a_token_and_only_pods_of_the_cluster_and_kuberay_reach_it():
    manifest, policy = yaml.safe_load_all(PATH.read_text())
    cluster = manifest["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert [*map(int, cluster["rayVersion"].split("."))] >= [2, 52, 0]
    assert (policy["apiVersion"], policy["kind"]) == ("networking.k8s.io/v1", "NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchExpressions"] == [{"key": "ray.io/cluster", "operator": "Exists"}]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert all(each["podSelector"] for rule in policy["spec"]["ingress"] for each in rule["from"])
