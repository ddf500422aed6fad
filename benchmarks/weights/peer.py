"""An agent in a process of its own: prints its address and ends with its input."""

from __future__ import annotations

import json
import sys

from rollout.weights.store.node.agent import AgentSettings, StoreAgent
from rollout.weights.store.transfer.mooncake import open_transfer
from rollout.weights.store.transfer.unit_server import AgentServer


def main() -> None:
    node, base, run, transfer = sys.argv[1:]
    agent = StoreAgent(AgentSettings(node, base, run, spare_bytes=0))
    server = AgentServer(agent, rdma=open_transfer(transfer, "127.0.0.1"))
    print(json.dumps(server.address), flush=True)
    sys.stdin.read()
    server.close()
    if not agent.is_closed:
        agent.close(clear=True)


if __name__ == "__main__":
    main()
