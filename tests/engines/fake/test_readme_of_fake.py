"""The fake's README: its blocks run, and each switch breaks its phase with the error it shows."""

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines.fake.engine.faults import parse_fault
from engines.process.tcp_ports import reserve_port
from rollout.control.engine.claim import remove_ended
from rollout.core.errors import PhaseFailed
from rollout.rules.lifecycle import OFFLOAD, SERVE_UPDATED, Command
from tests.support.builders import push, started_server
from tests.support.processes import program
from tests.support.virtual_time import virtual_time

README = Path(__file__).parents[3] / "engines/fake/README.md"
ROWS = re.findall(
    r"^\| `(\w+)` \| `(\w+[#\d]*:\S+)` \| `([^`]+)`", README.read_text(), re.MULTILINE
)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
# A shell in the place of the Python program.
SHELL = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[1]])"


def test_every_command_is_in_the_table() -> None:
    commands = [*OFFLOAD, Command.ONLOAD_WEIGHTS, Command.UPDATE_WEIGHTS, *SERVE_UPDATED]
    assert list(dict.fromkeys(command for command, _, _ in ROWS)) == commands


@pytest.mark.parametrize(("command", "switch", "says"), ROWS)
@virtual_time
async def test_a_switch_breaks_its_phase_as_the_table_says(
    command: str, switch: str, says: str, tmp_path: Path
) -> None:
    bench = await started_server(tmp_path, {"policy": {"num_engines": 1}})
    if command not in OFFLOAD:
        await bench.server.offload()
    parse_fault(switch).add_to(bench.engines[0].faults)
    with pytest.raises(PhaseFailed) as caught:
        await (bench.server.offload() if command in OFFLOAD else bench.server.push(push(1)))
    assert str(caught.value).startswith("group policy: ")
    assert says in str(caught.value)
    await bench.server.stop()


def with_free_ports(text: str) -> str:
    """The same with free ports in the place of those of the README."""
    for port in sorted(set(re.findall(r"3000\d", text))):
        with reserve_port() as reserved:
            text = text.replace(port, str(reserved.port))
    return text


def test_the_python_of_the_readme_makes_a_fake_with_a_fault() -> None:
    (code,) = [text for language, text in BLOCKS if language == "python"]
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    struck = names["engine"].faults.for_call("release_memory_occupation")
    assert struck == names["faults"].lose(executed=True)


def test_the_first_command_starts_a_fake() -> None:
    (command,) = [text for _, text in BLOCKS if text.startswith("python -m") and "\n" in text[-1:]][
        :1
    ]
    with program(*shlex.split(with_free_ports(command))[1:]) as fake:
        fake.wait_for("listens", 30)


def test_a_fault_is_set_on_a_running_deployment_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = [text for _, text in BLOCKS if "rollout serve" in text]
    in_first, in_second = with_free_ports(script).split("# In another terminal:\n")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with program("-c", SHELL, in_first, cwd=tmp_path) as served:
        served.wait_for("serving; files in", 60)
        words = shlex.split(in_second)
        content = words[words.index("-d") + 1]
        name, value = words[words.index("-H") + 1].split(": ")
        with httpx.Client(trust_env=False, timeout=30) as client:
            client.post(words[-1], content=content, headers={name: value}).raise_for_status()
            flush = words[-1].replace("/fake/fault", "/flush_cache")
            assert client.post(flush).status_code == 502
    remove_ended()  # it was killed; as the next run that attaches an engine
