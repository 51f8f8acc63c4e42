"""A run on the nodes of a Ray cluster, with one torchrun on each; its exit code is this job's.

ray job submit --working-dir . -- python ray_job.py --nodes 2 --gpus 4 hydra.run.dir=/shared/cola recipe=cola epochs=3
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys

import ray
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_restarts=0)
class Node:
    def address(self) -> tuple[str, int]:
        """Where torchrun on this node, as the first, can wait for the others."""
        with socket.create_server(("", 0)) as free:
            return get_node_ip_address(), free.getsockname()[1]

    def torchrun(self, arguments: list[str]) -> int:
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="of each node; 0: one worker on the CPU")
    options, overrides = parser.parse_known_args()
    ray.init(address="auto")
    needed = {"CPU": 1, "GPU": options.gpus} if options.gpus else {"CPU": 1}
    group = placement_group([needed] * options.nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    nodes = [
        Node.options(
            num_cpus=1,
            num_gpus=options.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(options.nodes)
    ]
    host, port = ray.get(nodes[0].address.remote())
    world = [f"--nnodes={options.nodes}", f"--nproc-per-node={options.gpus or 1}"]
    world += [f"--master-addr={host}", f"--master-port={port}"]
    running = [
        node.torchrun.remote([*world, f"--node-rank={number}", "-m", "runner", *overrides])
        for number, node in enumerate(nodes)
    ]
    return max(map(abs, ray.get(running)))


if __name__ == "__main__":
    sys.exit(main())
