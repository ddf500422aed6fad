"""Starting and ending the process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from engines.launch import LocalLauncher
from engines.protocol import NO_ACCESS
from engines.protocol.spec import EngineSpec
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


def with_module(folder: Path, name: str, text: str) -> str:
    """A search path on which this is the module of that name."""
    packages = folder / "packages"
    packages.mkdir(exist_ok=True)
    (packages / f"{name}.py").write_text(text)
    return f"{packages}{os.pathsep}{ROOT}"


def test_a_library_that_refuses_another_is_one_line_and_status_2(tmp_path: Path) -> None:
    """As some do that were installed without what they need."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    words = "huggingface-hub>=1.31.0 is required, but found huggingface-hub==1.5.0."
    path = with_module(tmp_path, "torch", f"raise ImportError({words!r} + '\\nTry: ')")
    ended = run("--model-path", str(tmp_path), "--port", "0", PYTHONPATH=path)
    assert one_line(ended).endswith(f"cannot be imported by {sys.executable}: {words}")


@pytest.mark.exec
@pytest.mark.embedded
async def test_transformers_beside_it_are_not_imported(models: dict[str, Path]) -> None:
    """Whatever their version, and where they cannot be imported at all."""
    folder = models["first"].parent
    path = with_module(folder, "transformers", "raise SystemError('imported')")
    spec = EngineSpec(
        engine_id="main-0",
        kind="embedded",
        model_path=str(models["first"]),
        log_path=str(folder / "engine.log"),
        env={"PYTHONPATH": path},
        access=NO_ACCESS,
    )
    launched = await LocalLauncher().launch(spec)
    try:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        async with httpx.AsyncClient(base_url=launched.endpoint.url, timeout=60) as http:
            answered = await http.post("/v1/chat/completions", json=body)
        assert answered.json()["usage"]["completion_tokens"] == 2
    finally:
        await launched.stop(5.0)


@pytest.mark.slow
@pytest.mark.embedded
def test_a_folder_without_tokenizer_json_is_one_line_and_status_2(models: dict[str, Path]) -> None:
    folder = shutil.copytree(models["first"], models["first"].parent / "without_tokenizer")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer.json" in one_line(run("--model-path", str(folder), "--port", "0"))


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
