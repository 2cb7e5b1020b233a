"""A Ray cluster on this machine for tests, in a process of its own: a head that is a node too, and
more nodes.

Each line of standard input asks for a node, with the environment variables that the line holds in
JSON; the reply is a line of JSON with the process of its raylet. The first line says the address
and the processes of the head too.
"""

import functools
import json
import sys
from pathlib import Path

import psutil
from ray._private import services
from ray._private.node import Node
from ray.cluster_utils import Cluster

SMALL = {
    "num_cpus": 1,
    "object_store_memory": 80 * 2**20,
    "include_dashboard": False,
    "include_log_monitor": False,
    "node_ip_address": "127.0.0.1",
    "setup_worker_path": __file__.replace("ray_cluster", "setup_worker"),
}


def without_agent(words, *rest, start=services.start_ray_process, **options):
    """Start a program of Ray. A raylet gets a process that sleeps in place of the agent of an
    unused dashboard.
    """
    named = dict(word.partition("=")[::2] for word in words)
    if "--dashboard_agent_command" in named:
        words = [*words, "--dashboard_agent_command=sleep infinity"]  # of two the last holds
        for port in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
            Path(named["--session_dir"], f"{port}_{named['--node_id']}").write_text("1")
    return start(words, *rest, **options)


def raylet(node):
    return node.all_processes["raylet"][0].process.pid


def patiently(start, tries=3):
    """What `start` returns. Ray gives up what has not started within 30 s, as it may where
    others are at work.
    """
    before = psutil.Process().children(recursive=True)
    try:
        return start()
    except Exception:
        if tries == 1:
            raise
        for process in psutil.Process().children(recursive=True):
            if process not in before:
                process.kill()
        return patiently(start, tries - 1)


if __name__ == "__main__":
    services.start_ray_process = without_agent
    Node.start_api_server = lambda *_, **__: None  # also without a dashboard it would be a process
    cluster = patiently(
        lambda: Cluster(initialize_head=True, head_node_args=SMALL | {"no_monitor": True})
    )
    head = [cluster.head_node.all_processes["gcs_server"][0].process.pid, raylet(cluster.head_node)]
    print(json.dumps({"address": cluster.address, "head": head}), flush=True)
    for line in sys.stdin:
        node = patiently(functools.partial(cluster.add_node, **SMALL, env_vars=json.loads(line)))
        print(json.dumps({"raylet": raylet(node)}), flush=True)
    cluster.shutdown()
