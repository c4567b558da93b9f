"""`python -m tests.api.cluster.ray_scenario FOLDER`: a cluster on two Ray nodes, of which one is killed.

Requests go on all the time. Every one is answered with the right tokens, or refused with a clear error.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from ray.cluster_utils import Cluster

from tests.api.cluster.test_cluster import ClusterProcess, traffic
from tests.api.hash_traffic import make_checkpoint

FILE = """
launcher = "ray"
model = "model"
[options]
memory = "64M"
drain_timeout = 2
[engines.prefill]
cpus = 1
options = {{role = "prefill"}}
[engines.decode]
replicas = 2
cpus = 1
options = {{role = "decode"}}
[ray]
address = "{address}"
"""
SECONDS = 60.0


async def scenario(nodes: Cluster, folder: Path) -> None:
    with ClusterProcess(folder) as cluster:
        cluster.wait_until(lambda: cluster.phases() == ["ready"] * 3)
        over = asyncio.Event()
        sending = asyncio.ensure_future(traffic(cluster, over))
        await asyncio.sleep(5)
        actors = pids_of("ray::ProcessActor")
        assert len(actors) == 3, actors
        os.kill(actors[-1], signal.SIGKILL)
        await ready(cluster)
        print("an actor was killed", flush=True)
        nodes.remove_node(nodes.list_all_nodes()[-1], allow_graceful=False)
        print("a node was killed", flush=True)
        await asyncio.sleep(SECONDS)
        await ready(cluster)
        over.set()
        outcomes = await sending
    assert outcomes.keys() <= {"length", "503"} and outcomes["503"] < outcomes["length"] / 10, outcomes
    print("survived", dict(Counter(outcomes)), flush=True)


async def ready(cluster: ClusterProcess) -> None:
    async with asyncio.timeout(90):
        while await asyncio.to_thread(cluster.phases) != ["ready"] * 3:  # noqa: ASYNC110 (of another process)
            await asyncio.sleep(0.5)


def pids_of(title: str) -> list[int]:
    """Return the processes whose command line begins with this title."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cmdline").read_bytes().startswith(title.encode()):
                found.append(int(path.name))
        except OSError:
            continue
    return sorted(found)


def main() -> None:
    folder = Path(sys.argv[1])
    (folder / "model").mkdir()
    make_checkpoint(folder / "model", delay_ms=[2, 6])
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 3})
    nodes.add_node(num_cpus=3)
    (folder / "cluster.toml").write_text(FILE.format(address=nodes.address))
    try:
        asyncio.run(scenario(nodes, folder))
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main()
