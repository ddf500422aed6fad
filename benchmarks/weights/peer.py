"""An agent in a process of its own: prints where it listens, ends with its input."""

from __future__ import annotations

import json
import sys

from rollout.weights.store.agent import AgentSettings, StoreAgent
from rollout.weights.store.serving import AgentServer


def main() -> None:
    node, base, run = sys.argv[1:]
    agent = StoreAgent(AgentSettings(node, base, run, spare_bytes=0))
    server = AgentServer(agent)
    print(json.dumps(server.address), flush=True)
    sys.stdin.read()
    server.close()
    if not agent.is_closed:
        agent.close(clear=True)


if __name__ == "__main__":
    main()
