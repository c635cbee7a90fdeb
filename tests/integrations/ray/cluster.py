"""Clusters of Ray on this machine's loopback device: one node, or several that come and go."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
ADDRESS = "127.0.0.2"
"""Of the loopback device. In place of 127.0.0.1 Ray would look for a cluster at the machine's own address."""
STORE = 100 << 20
"""Bytes of a node's object store."""
SECONDS = 420.0
"""How long what has to happen is waited for."""


def settings() -> dict[str, Any]:
    """Settings of `ray.init`."""
    # Ray may be in a folder of its own, which only PYTHONPATH names.
    modules = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": modules,
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "20",
    }
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    return {"runtime_env": {"env_vars": environment}, "log_to_driver": False}


@contextmanager
def one_node(cpus: int) -> Iterator[Any]:
    """A cluster of one node; what `ray.init` tells of it."""
    import ray

    yield ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=STORE,
        _node_ip_address="127.0.0.1",
        **settings(),
    )
    ray.shutdown()


class Nodes:
    """A head without CPUs and nodes of one CPU each, which hold a worker each."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._nodes: list[Any] = []

    def add(self) -> None:
        """A node comes."""
        self._nodes.append(self._cluster.add_node(num_cpus=1, object_store_memory=STORE, node_ip_address=ADDRESS))

    def lose(self) -> None:
        """The oldest node goes, with all its processes and without a word."""
        self._cluster.remove_node(self._nodes.pop(0), allow_graceful=False)

    def give_notice(self, seconds: int) -> None:
        """Announce by Ray's own command that the oldest node will be taken away, in so many seconds."""
        asked = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot")
        node = ("--address", self._cluster.address, "--node-id", self._nodes[0].node_id)
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", *node, *asked]
        subprocess.run([*command, "--deadline-remaining-seconds", str(seconds)], check=True, capture_output=True)


@contextmanager
def several_nodes(count: int) -> Iterator[Nodes]:
    """A cluster of a head and `count` nodes."""
    import ray
    from ray.cluster_utils import Cluster

    options = settings()
    head = {"num_cpus": 0, "object_store_memory": STORE, "node_ip_address": ADDRESS, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    nodes = Nodes(cluster)
    try:
        for _ in range(count):
            nodes.add()
        ray.init(address=cluster.address, **options)
        yield nodes
    finally:
        ray.shutdown()
        cluster.shutdown()


def wait_for(found: Callable[[], object]) -> None:
    """Wait for an event.

    Raises:
        TimeoutError: If it does not come about.
    """
    end = time.monotonic() + SECONDS
    while not found():
        if time.monotonic() > end:
            raise TimeoutError(f"{getattr(found, '__qualname__', found)} has not come about in {SECONDS:g} s")
        time.sleep(0.05)


def during(run: Callable[[], Any], events: Callable[[], None]) -> Any:
    """Let events happen during a run, whose result it returns; nodes come in the main thread alone."""
    running = ThreadPoolExecutor(1).submit(run)
    events()
    return running.result()
