"""SGLang gets its keys, and nothing else on the host does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from engines.launch import EngineSpec, LocalLauncher, invocation
from engines.protocol import NO_ACCESS, Endpoint, EngineAccess

# In the place of SGLang: it writes down what it got, and so does a process that it spawns.
SERVER = """
import http.server, json, logging, multiprocessing, os, sys

def child(folder):
    write(folder, "child")

def write(folder, name):
    command = open("/proc/self/cmdline").read()
    keys = [key for key in os.environ if key.startswith("ENGINE_") and key.endswith("_KEY")]
    found = {"argv": sys.argv, "command": command, "keys": keys, "main": __name__}
    with open(os.path.join(folder, name + ".json"), "w") as file:
        json.dump(found, file)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass

if __name__ == "__main__":
    logging.basicConfig(level="INFO", force=True)
    logging.info(f"server_args={sys.argv}")
    folder = os.environ["WRITTEN"]
    write(folder, "main")
    spawned = multiprocessing.get_context("spawn").Process(target=child, args=(folder,))
    spawned.start()
    spawned.join()
    port = int(sys.argv[sys.argv.index("--port") + 1])
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


async def test_keys_are_in_no_command_no_log_and_no_childs_environment(tmp_path: Path) -> None:
    package = tmp_path / "installed" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(SERVER)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    log = tmp_path / "engine.log"
    env = {"WRITTEN": str(tmp_path)}
    spec = EngineSpec("main-0", "sglang", "/m", str(log), python=str(python), env=env)
    engine = await LocalLauncher().launch(spec)
    await engine.stop(5.0)
    keys = [engine.access.sampling, engine.access.control]
    main, child = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("main", "child")
    )
    flags = [f"--api-key={keys[0]}", f"--admin-api-key={keys[1]}"]
    assert main["argv"][-2:] == flags
    assert main["keys"] == child["keys"] == []
    # As with -m: what it spawns imports the module by its name.
    assert (main["main"], child["main"]) == ("__main__", "__mp_main__")
    assert "(a key)" in log.read_text()
    shown = [main["command"], child["command"], log.read_text()]
    assert not [text for text in shown for key in keys if key in text]


def test_without_keys_it_is_started_as_by_hand() -> None:
    here = Endpoint("127.0.0.1", 1)
    for access in (None, NO_ACCESS):
        spec = EngineSpec("main-0", "sglang", "/m", "", access=access)
        assert list(invocation(spec, here, {}).command[1:3]) == ["-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    "options", [{"tokenizer-worker-num": 2}, {"grpc-port": 4000}], ids=["workers", "grpc"]
)
def test_what_has_no_keys_in_sglang_is_refused_with_what_works(options: dict[str, int]) -> None:
    here = Endpoint("127.0.0.1", 1)
    spec = EngineSpec("main-0", "sglang", "/m", "", options=options, access=EngineAccess("a", "b"))
    with pytest.raises(ValueError, match=r"set engine\.key to false"):
        invocation(spec, here, {})
    without = EngineSpec("main-0", "sglang", "/m", "", options=options, access=NO_ACCESS)
    assert invocation(without, here, {}).command
