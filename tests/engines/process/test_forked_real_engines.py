"""A real engine that is forked in its interpreter is the one that ``exec`` would have started."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from engines.http.key_check import new_access
from engines.launch import EngineSpec, LocalLauncher, invocation
from engines.process import guarded_process
from engines.process.guarded_process import KILL
from engines.protocol import Endpoint
from tests.engines.conftest import models_of
from tests.support.contract import GREEDY, PROMPT, client
from tests.support.cpu_engines import cpu_engine
from tests.support.forking.guarded_witness import (
    WAYS,
    WITNESS,
    GuardedWitness,
    choose,
    plain,
    was_forked,
)
from tests.support.forking.origins import Origin, own_origin, real_origins
from tests.support.forking.starts import ForkServerDied, Starts
from tests.support.processes import sockets_of, wait_until

KINDS = [
    pytest.param("sglang", marks=pytest.mark.sglang),
    pytest.param("vllm", marks=pytest.mark.vllm),
]
PROGRAMS = {"sglang": "sglang.launch_server", "vllm": "vllm.entrypoints.openai.api_server"}
# SGLang opens one when it is imported.  The pipes of vLLM lead to the process that forks its core,
# and to the tracker of both.
OPEN = {"sglang": ["anon_inode:"], "vllm": ["pipe:", "pipe:"]}
SET_BY_AN_IMPORT = {"sglang": "TRITON_CACHE_DIR", "vllm": "PYTORCH_NVML_BASED_CUDA_CHECK"}
READ_AT_AN_IMPORT = {"sglang": "SGLANG_RETURN_ORIGINAL_LOGPROB", "vllm": "OMP_NUM_THREADS"}
READ_LATE = {"sglang": "SGLANG_VLM_CACHE_SIZE_MB", "vllm": "RAY_TMPDIR"}

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def origin(kind: str) -> Origin:
    """That of this kind, which forks the witness too."""
    (found,) = [one for one in real_origins() if one.programs.fullmatch(PROGRAMS[kind])]
    return replace(found, programs=re.compile(f"{found.programs.pattern}|{re.escape(WITNESS)}"))


@pytest.fixture(scope="module")
def one_server(origin: Origin) -> Iterator[Starts]:
    made = Starts([origin])
    yield made
    made.close()


@pytest.fixture
def both(one_server: Starts, monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Used for guards; ``choose`` says which way."""
    monkeypatch.setattr(guarded_process, "start_guard", one_server.start_guard)
    return one_server


def test_a_process_of_its_interpreter_finds_what_exec_gives(
    both: Starts, origin: Origin, kind: str, tmp_path: Path
) -> None:
    found: dict[str, Any] = {}
    env = {**origin.environment(), READ_LATE[kind]: "7"}
    for way in WAYS:
        choose(both, way)
        (tmp_path / way).mkdir()
        engine = GuardedWitness(tmp_path / way, "says", python=origin.python, env=env)
        status, text = engine.ended()
        assert status == 0, text
        assert was_forked(both) is (way == "fork")
        found[way] = plain(text)["seen"]
        token = found[way]["environment"].pop("ENGINE_GUARD_TOKEN")
        found[way]["environment_in_proc"].remove(f"ENGINE_GUARD_TOKEN={token}")
        for fd in ("1", "2"):
            assert found[way]["descriptors"].pop(fd) == str(engine.log)
        # Whatever has one by Python is among the handlers; a library may have one in C.
        del found[way]["status"]["SigCgt"]
    exec_, fork = found["exec"], found["fork"]
    opened = fork["descriptors"].keys() - exec_["descriptors"].keys()
    assert sorted(fork["descriptors"].pop(fd) for fd in opened) == OPEN[kind]
    # What the modules do when they are imported, which the witness does not import.
    given, has = exec_.pop("environment"), fork.pop("environment")
    assert SET_BY_AN_IMPORT[kind] in has.keys() - given.keys()
    assert has.items() >= given.items()
    added = [folder for folder in fork["path"] if folder not in exec_["path"]]
    assert [folder for folder in fork.pop("path") if folder not in added] == exec_.pop("path")
    assert fork == exec_


async def test_it_has_the_same_processes_and_answers_the_same(
    both: Starts, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(models_of(kind)).first
    found = {}
    for way in WAYS:
        choose(both, way)
        spec = EngineSpec(
            engine_id=f"{kind}-{way}",
            model_path=str(model),
            log_path=str(tmp_path / f"{way}.log"),
            **cpu_engine(kind),
        )
        running = await LocalLauncher().launch(spec)
        assert was_forked(both) is (way == "fork")
        assert running.pid is not None
        root = psutil.Process(running.pid)
        processes = [root, *root.children(recursive=True)]
        engine = client(running, spec.engine_id, kind)
        reply = await engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
        await engine.aclose()
        found[way] = {
            "titles": sorted(filter(None, map(title_of, processes[1:]))),
            "name": root.name(),
            "command": [word for word in root.cmdline() if word != str(running.endpoint.port)],
            "folder": root.cwd(),
            "token": "ENGINE_GUARD_TOKEN" in root.environ(),
            "sessions": {os.getsid(one.pid) == root.pid for one in processes},
            "is_under_guard": psutil.Process(root.ppid()).name(),
            "folders_of_sockets": len({one.parent for one in sockets_of(root.pid)}),
            "tokens": reply.output_ids,
        }
        await running.stop(20.0)
        assert wait_until(lambda left=processes: not any(map(is_alive, left)), 20)  # type: ignore[misc]
    assert found["fork"] == found["exec"]


def title_of(process: psutil.Process) -> str:
    """What it calls itself; empty for those that Python starts for others."""
    first, *rest = [word for word in process.cmdline() if word]
    return "" if "from multiprocessing." in "".join(rest) else first


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_variable_that_is_read_at_an_import_leads_to_exec(
    both: Starts, origin: Origin, kind: str, tmp_path: Path
) -> None:
    choose(both, "fork")
    env = {**origin.environment(), READ_AT_AN_IMPORT[kind]: "3"}
    engine = GuardedWitness(tmp_path, "exits", python=origin.python, env=env)
    assert engine.ended()[0] == 7
    assert both.reasons == [f"{READ_AT_AN_IMPORT[kind]} may have been read at an import"]


def test_only_its_server_is_forked_in_its_interpreter(kind: str) -> None:
    (found,) = [one for one in real_origins() if one.programs.fullmatch(PROGRAMS[kind])]
    assert found.is_of([found.python, "-m", PROGRAMS[kind], "--port", "1"])
    spec = EngineSpec("main-0", kind, "/m", "", python=found.python, access=new_access())
    assert found.is_of(invocation(spec, Endpoint("127.0.0.1", 1), {}).command)
    assert not found.is_of([sys.executable, "-m", PROGRAMS[kind]])
    assert not found.is_of([found.python, "-m", f"{kind}.other"])
    assert not found.is_of([found.python, "-c", "pass"])
    assert not own_origin().is_of([found.python, "-m", "engines.embedded"])


def test_a_server_of_its_interpreter_that_dies_fails_the_start_with_its_last_lines(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a_bad_module.py").write_text("raise ImportError('a bad library')")
    env = {**origin.environment(), "PYTHONPATH": str(tmp_path)}
    bad = replace(origin, modules=["a_bad_module"], environment=lambda: env)
    made = Starts([bad])
    monkeypatch.setattr(guarded_process, "start_guard", made.start_guard)
    choose(made, "fork")
    with pytest.raises(ForkServerDied, match=r"(?s)status 1:.*ImportError: a bad library"):
        GuardedWitness(tmp_path, "waits", python=origin.python, env=env)
    assert not made.servers
    (tmp_path / "a_bad_module.py").write_text("")
    engine = GuardedWitness(tmp_path, "waits", python=origin.python, env=env)
    engine.waits()
    made.servers[origin.python].process.send_signal(signal.SIGKILL)
    with pytest.raises(ForkServerDied, match="ended with status -9"):
        GuardedWitness(tmp_path, "waits", python=origin.python, env=env)
    engine.guarded.send(KILL)
    assert wait_until(engine.is_gone, 30)
    assert was_forked(made)
    made.close()
