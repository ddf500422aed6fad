"""Starting and ending the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import tomllib
from importlib import metadata
from pathlib import Path

import httpx
import pytest
from engines.embedded.__main__ import OLDEST_TRANSFORMERS
from engines.launch import LocalLauncher
from engines.protocol.errors import EngineNotReady
from engines.protocol.spec import EngineSpec
from packaging.requirements import Requirement
from packaging.version import Version
from tests.engines.embedded.engine_client import Server, connected
from tests.support.nvml import logical_gpu_environment

ROOT = Path(__file__).parents[4]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "engines.embedded", *arguments]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False
    )


def one_line(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    return line


def test_a_missing_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere")
    assert path in one_line(run("--model-path", path))


def test_a_directory_that_is_no_model_is_one_line_and_status_2(tmp_path: Path) -> None:
    assert "config.json" in one_line(run("--model-path", str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    assert "model_type" in one_line(run("--model-path", str(tmp_path)))


@pytest.mark.slow
@pytest.mark.embedded
def test_an_unknown_architecture_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    assert "no_such_model" in one_line(run("--model-path", str(tmp_path), "--port", "0"))


@pytest.mark.slow
@pytest.mark.embedded
def test_a_cache_that_does_not_fit_names_the_option(tmp_path: Path) -> None:
    from rollout.testing.tiny_model import make_tiny_model

    model = str(make_tiny_model(tmp_path / "tiny"))
    line = one_line(run("--model-path", model, "--port", "0", "--max-total-tokens", "9000000000"))
    assert "with max-total-tokens 9000000000: " in line
    assert "lower that option" in line


def test_a_taken_port_is_one_line_and_status_2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = one_line(run("--model-path", str(tmp_path), "--port", str(port)))
    assert f"127.0.0.1:{port}" in line


def installed(folder: Path, version: str) -> str:
    """A search path on which this version of transformers is the installed one."""
    packages = folder / "packages"
    info = packages / f"transformers-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: transformers\nVersion: {version}\n")
    return f"{packages}{os.pathsep}{ROOT}"


@pytest.mark.parametrize("version", ["4.57.6", "5.10.0", "5.17.0", "5.18.0"])
async def test_older_transformers_are_one_sentence_in_the_error_of_the_launch(
    tmp_path: Path, version: str
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    spec = EngineSpec(
        engine_id="main-0",
        kind="embedded",
        model_path=str(tmp_path),
        log_path=str(tmp_path / "engine.log"),
        env={"PYTHONPATH": installed(tmp_path, version)},
    )
    with pytest.raises(EngineNotReady, match="main-0: exited with status 2") as failed:
        await LocalLauncher().launch(spec)
    (line,) = failed.value.log_tail.splitlines()
    has = f"{sys.executable} has {version}"
    assert line == f"engines.embedded: needs transformers 5.19 or newer, and {has}"
    assert line in str(failed.value)


def test_a_library_that_refuses_another_is_one_line_and_status_2(tmp_path: Path) -> None:
    """As transformers does that was installed without what it needs."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path = installed(tmp_path, "5.19.0")
    words = "huggingface-hub>=1.31.0 is required, but found huggingface-hub==1.5.0."
    for name in ("torch", "transformers"):
        (tmp_path / "packages" / f"{name}.py").write_text(
            f"raise ImportError({words!r} + '\\nTry: ')"
        )
    ended = run("--model-path", str(tmp_path), "--port", "0", PYTHONPATH=path)
    assert one_line(ended).endswith(f"cannot be imported by {sys.executable}: {words}")


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.parametrize(("end", "status"), [("sys.exit(2)", 1), ("give_up('why')", 2)])
def test_an_engine_that_gives_up_after_a_region_of_the_saver_ends_with_its_own_status(
    tmp_path: Path, end: str, status: int
) -> None:
    """In mode torch, the double ends any other exit with status 1, as the real one does."""
    program = (
        "import sys, torch\n"
        "from engines.embedded.__main__ import give_up\n"
        "from engines.embedded.memory.regions import Memory\n"
        "from engines.protocol import MemoryTag\n"
        "memory = Memory(torch.device('cuda'), saver=True, weights_backup=False)\n"
        "memory.allocate(MemoryTag.WEIGHTS, [(torch.Size([4]), torch.float32)])\n"
    )
    env = {**os.environ, **logical_gpu_environment(tmp_path), "CUDA_VISIBLE_DEVICES": "0"}
    ended = subprocess.run(
        [sys.executable, "-c", program + end], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == status, ended.stderr
    assert ("engines.embedded: why" in ended.stderr) is (status == 2)


@pytest.mark.embedded
def test_the_oldest_transformers_that_pip_installs_are_those_that_tests_run_on() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (bound,) = (one for one in map(Requirement, extras["embedded"]) if one.name == "transformers")
    (oldest,) = (one.version for one in bound.specifier if one.operator == ">=")
    assert Version(oldest).release == OLDEST_TRANSFORMERS
    assert Version(metadata.version("transformers")).release[:2] == OLDEST_TRANSFORMERS


@pytest.mark.exec
@pytest.mark.embedded
@pytest.mark.parametrize("mode", ["abort", pytest.param("in_place", marks=pytest.mark.slow)])
async def test_sigterm_ends_it_promptly_even_paused_with_requests(
    models: dict[str, Path], mode: str
) -> None:
    server = Server(models["first"])
    try:
        await asyncio.to_thread(server.wait_until_ready)
        async with contextlib.AsyncExitStack() as stack:
            asker = await stack.enter_async_context(connected(server, restores=False))
            await stack.enter_async_context(asker.in_flight())
            await asker.post("/pause_generation", mode=mode)
            held = asyncio.create_task(asker.generate())
            while (await asker.get("/server_info"))["num_held_requests"] == 0:
                assert not held.done()
            words = await asker.refused(409, "/release_memory_occupation")
            assert "--enable-memory-saver" in words
            began = time.monotonic()
            await asyncio.to_thread(server.stop)
            assert time.monotonic() - began < 5
            assert server.process.report.exit_status == 0
            with contextlib.suppress(httpx.TransportError):
                assert (await held)["meta_info"]["finish_reason"]["type"] == "abort"
    finally:
        server.kill()
    assert "Traceback" not in server.log
