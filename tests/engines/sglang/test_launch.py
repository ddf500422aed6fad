"""Launching SGLang, with a small program in the place of its interpreter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from engines.launch import EngineSpec, LocalLauncher, invocation, start_settings
from engines.process.tcp_ports import reserve_port
from engines.protocol import Endpoint
from engines.protocol.errors import EngineNotReady, PortTaken
from tests.support.cuda_wheels import CudaWheels

# Serves what a server of SGLang would, on the port that the command line says.
SERVER = """#!{python}
import http.server, json, os, sys
arguments = sys.argv[1:]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_there = self.path in {paths}
        self.send_response(200 if is_there else 503)
        self.end_headers()
    def log_message(self, *args):
        pass
print(json.dumps([arguments, dict(os.environ)]), flush=True)
port = int(arguments[arguments.index("--port") + 1])
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def program(folder: Path, text: str) -> str:
    path = folder / "python"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def spec(folder: Path, python: str, **fields: Any) -> EngineSpec:
    return EngineSpec(
        engine_id="main-0",
        kind="sglang",
        model_path="/models/m",
        log_path=str(folder / "engine.log"),
        python=python,
        start_timeout_s=fields.pop("start_timeout_s", 20.0),
        **fields,
    )


async def test_an_engine_that_never_becomes_ready_ends_with_its_log(tmp_path: Path) -> None:
    stuck = program(tmp_path, "#!/bin/sh\necho loading shard 3 of 7\nexec sleep 600\n")
    with pytest.raises(EngineNotReady, match="main-0: not ready after 1 s") as failed:
        await LocalLauncher().launch(spec(tmp_path, stuck, start_timeout_s=1.0))
    assert "loading shard 3 of 7" in str(failed.value)


async def test_an_engine_that_dies_while_it_starts_says_why(tmp_path: Path) -> None:
    dying = program(tmp_path, "#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(EngineNotReady, match="exited with status 3") as failed:
        await LocalLauncher().launch(spec(tmp_path, dying))
    assert failed.value.log_tail == "no such model"
    assert failed.value.exit_status == 3


async def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineNotReady, match="cannot start /no/python"):
        await LocalLauncher().launch(spec(tmp_path, "/no/python"))


async def test_an_option_of_ours_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    started = program(tmp_path, f"#!/bin/sh\ntouch {tmp_path}/started\n")
    with pytest.raises(ValueError, match="port"):
        await LocalLauncher().launch(spec(tmp_path, started, options={"port": 1}))
    assert not (tmp_path / "started").exists()


async def test_a_launched_engine_gets_its_flags_and_its_environment(tmp_path: Path) -> None:
    server = program(tmp_path, SERVER.format(python=sys.executable, paths=("/ready",)))
    engine = await LocalLauncher().launch(
        spec(tmp_path, server, gpu_ids=(3,), env={"NCCL_DEBUG": "WARN"})
    )
    try:
        assert await engine.is_alive()
        said = (tmp_path / "engine.log").read_text()
        assert '"--enable-memory-saver"' in said
        assert '"CUDA_VISIBLE_DEVICES": "3"' in said
        assert '"NCCL_DEBUG": "WARN"' in said
    finally:
        await engine.stop(5.0)
    assert not await engine.is_alive()


def test_a_path_that_is_extended_is_neither_dropped_nor_overridden(tmp_path: Path) -> None:
    wheels = CudaWheels(tmp_path, "13.0")
    folder = wheels.add("cu13", 13).parent
    own = {"PATH": "/bin", "LD_LIBRARY_PATH": "/own", "RANK": "0"}
    of_engine = spec(tmp_path, wheels.python, gpu_ids=(0,))
    assert invocation(of_engine, Endpoint("127.0.0.1", 1), own).env["LD_LIBRARY_PATH"] == (
        f"/own:{folder}"
    )
    settings = start_settings(of_engine, own)
    assert (settings.dropped, settings.overrides) == (["RANK"], [])


async def test_the_address_where_nodes_meet_is_held_until_the_first_starts(tmp_path: Path) -> None:
    launcher = LocalLauncher()
    address = launcher.hold_address("127.0.0.1")
    port = int(address.rpartition(":")[2])
    with pytest.raises(PortTaken):
        reserve_port("127.0.0.1", port)
    nodes: dict[str, Any] = {"num_nodes": 2, "dist_init_addr": address}
    # Nodes behind the first answer /health alone, and do not take the address from it.
    follower = program(tmp_path, SERVER.format(python=sys.executable, paths=("/health",)))
    second = await launcher.launch(spec(tmp_path, follower, node_rank=1, **nodes))
    try:
        with pytest.raises(PortTaken):
            reserve_port("127.0.0.1", port)
    finally:
        await second.stop(5.0)
    leader = program(tmp_path, SERVER.format(python=sys.executable, paths=("/ready",)))
    first = await launcher.launch(spec(tmp_path, leader, node_rank=0, **nodes))
    try:
        reserve_port("127.0.0.1", port).release()
    finally:
        await first.stop(5.0)
