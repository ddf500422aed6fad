"""An engine that only loads weights: the embedded engine's code for that, without a model.

    python -m benchmarks.weights.receiver MANIFEST.json ADDRESS

It holds the tensors of the manifest, prints its port, and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from safetensors.torch import load

from benchmarks.weights.holder import Holder, allocated
from engines.embedded.memory.mapped_files import MappedFiles
from engines.embedded.weights.broadcast_receiver import BroadcastReceiver
from engines.embedded.weights.disk_update import update_from_disk
from engines.embedded.weights.model_weights import ModelWeights
from engines.embedded.weights.payload_tensors import read_payload
from engines.protocol import encoded_from
from engines.tensors.collective.bucket import content_of


class Receiver:
    """Serves the weight calls of an engine, one at a time."""

    def __init__(self, specs: list[dict[str, Any]]) -> None:
        layout = {spec["name"]: (spec["shape"], getattr(torch, spec["dtype"])) for spec in specs}
        self.weights = ModelWeights(Holder(allocated(layout)))
        self.weights.version = lambda: encoded_from(self.version)
        self.mapped = MappedFiles()
        self.receiver = BroadcastReceiver(self.weights, torch.device("cpu"))
        self.version = "0"
        self.copies: dict[str, torch.Tensor] = {}

    def update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        named = read_payload(body["serialized_named_tensors"][0], body.get("load_format"))
        for change in self.weights.changes(named):
            change()
        self.copies.clear()

    def update_weights_from_disk(self, body: dict[str, Any]) -> None:
        update_from_disk(self.weights, body["model_path"], self.mapped)

    def init_weights_update_group(self, body: dict[str, Any]) -> None:
        self.receiver.groups.join(
            group_name=body["group_name"],
            backend=body["backend"],
            master_address=body["master_address"],
            master_port=body["master_port"],
            rank=body["rank_offset"],
            world_size=body["world_size"],
        )

    def update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        plan = self.receiver.plan(content_of(body))
        buffer = self.receiver.take(plan)
        self.receiver.groups.receive(
            self.receiver.parts(plan, buffer), group_name=body["group_name"]
        )
        self.receiver.deliver(plan, buffer)

    def destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        self.receiver.groups.leave(body["group_name"])

    def update_weight_version(self, body: dict[str, Any]) -> None:
        self.version = body["new_version"]

    def begin_weight_update(self, body: dict[str, Any]) -> None:
        """Nothing to do."""

    def end_weight_update(self, body: dict[str, Any]) -> None:
        self.receiver.free()

    def peer_delta(self, content: bytes) -> None:
        """See ``link``: a dense copy is changed, and whole tensors are loaded from it."""
        pushed = load(content)
        for name in {name.rpartition(".")[0] for name in pushed}:
            own = self.weights.find(name)
            copy = self.copies.setdefault(name, own.clone())
            copy.view(-1)[pushed[f"{name}.indices"].long()] = pushed[f"{name}.values"]
            own.copy_(copy)

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        digests, whole = self.weights.checksum()
        return {"per_engine_checksum": whole, "ranks": [{"checksums": digests}]}


def make_app(receiver: Receiver) -> FastAPI:
    app = FastAPI()

    @app.get("/model_info")
    async def model_info() -> dict[str, str]:
        return {"model_path": "", "weight_version": receiver.version}

    @app.get("/server_info")
    async def server_info() -> dict[str, str]:
        return {"version": "", "engine": "receiver"}

    @app.post("/peer_delta")
    async def peer_delta(request: Request) -> None:
        await asyncio.to_thread(receiver.peer_delta, await request.body())

    @app.post("/{operation}")
    async def serve(operation: str, request: Request) -> dict[str, Any]:
        body = json.loads(await request.body())
        fields = await asyncio.to_thread(getattr(receiver, operation), body)
        receiver.version = body.get("weight_version") or receiver.version
        return {"success": True, "message": "", **(fields or {})}

    return app


def main() -> None:
    torch.set_num_threads(1)
    specs = json.loads(Path(sys.argv[1]).read_text())
    app = make_app(Receiver(specs))
    listener = socket.create_server((sys.argv[2], 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))

    def end_with_the_parent() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end_with_the_parent, daemon=True).start()
    gc.freeze()  # as the embedded engine does
    print(listener.getsockname()[1], flush=True)
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
