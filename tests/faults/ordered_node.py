"""A node of a Ray cluster that Ray's autoscaler orders, and that comes when a test says so."""

import json
import os
import time
from pathlib import Path

from ray._private.services import start_monitor
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)


class Provider(FakeMultiNodeProvider):
    """Starts the node on this machine, as Ray does in its own tests, once the file is there that the test makes."""

    def create_node_with_resources_and_labels(self, *what):
        while not Path("released").exists():
            time.sleep(0.05)
        super().create_node_with_resources_and_labels(*what)


def prepare():
    """Let the autoscaler know the head that is started after this."""
    known = dict.fromkeys(("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"), FAKE_HEAD_NODE_ID)
    known["RAY_NODE_TYPE_NAME"] = FAKE_HEAD_NODE_TYPE
    os.environ |= known | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}


def order(head):
    """Have an autoscaler see to it that there is always one node beside the head, on which nothing runs."""
    nodes = {
        FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
        "other": {
            "resources": {"CPU": 1, "object_store_memory": 80 * 2**20}, "node_config": {},
            "min_workers": 1, "max_workers": 1,
        },
    }  # fmt: skip
    provider = {
        "type": "external", "module": "ordered_node.Provider", "gcs_address": head.gcs_address,
        "disable_node_updaters": True,
    }  # fmt: skip
    config = Path("autoscaler.json").resolve()
    needed = dict.fromkeys(
        ("setup_commands", "head_setup_commands", "worker_setup_commands", "cluster_synced_files"), ()
    )
    config.write_text(json.dumps(needed | {
        "cluster_name": "of tests", "max_workers": 1, "provider": provider, "head_node_type": FAKE_HEAD_NODE_TYPE,
        "available_node_types": nodes,
    }))  # fmt: skip
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    outputs = [str(Path(name).resolve()) for name in ("autoscaler.out", "autoscaler.err")]
    start_monitor(head.gcs_address, head.get_logs_dir_path(), *outputs, str(config), autoscaler_v2=True)
