"""Every command's output in a pipe and in terminals: plain lines, and addresses whole."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.panel import Panel

from rollout.cli.lib import output
from rollout.cli.lib.server_view import render_server
from rollout.cli.main import app
from rollout.config.run_dir import RunFolder
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.data.saved_groups import write_groups
from rollout.runtime.handle import DeploymentHandle
from rollout.runtime.local import launch_local
from tests.support.paged import step, until
from tests.support.served_fakes import config, launched

WIDTHS = {"pipe": 0, "80": 80, "200": 200}
COLORS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
DRAWN = re.compile(r"[\u2500-\u259f]")
ADDRESS = re.compile(r"https?://[\w.:/-]+")

COMMANDS = {
    "version": ["version"],
    "validate": ["validate", "FILE"],
    "plan": ["plan", "FILE"],
    "schema": ["schema"],
    "status": ["status", "RUN"],
    "top": ["top", "RUN", "--num", "2", "--every", "0.2"],
    "doctor": ["doctor", "RUN"],
    "attach": ["attach", "RUN"],
    "trace": ["trace", "RUN"],
    "trace --launches": ["trace", "RUN", "--launches"],
    "report": ["report", "RUN"],
    "report --launches": ["report", "RUN", "--launches"],
    "debug samples": ["debug", "samples", "GROUPS"],
}
# One with a reply that is longer than a line, and ends in spaces.
GROUPS = [SampleGroup(0, [Sample([1, 2], [3], [-0.1], text="a word \n" * 40, reward=0.5)])]
# Tested below.  The quickstart becomes the example, and prints nothing itself.
OTHERS = {"serve", "stop", "quickstart"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentHandle]:
    with launched(launch_local, tmp_path_factory.mktemp("run")) as handle:
        step(handle["policy"], 1)
        yield handle


@pytest.fixture(params=WIDTHS)
def width(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The columns of the terminal; 0: a pipe, whose reader may have a terminal of 80."""
    columns = WIDTHS[request.param]
    monkeypatch.setenv("COLUMNS", str(columns or 80))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return columns


def lines_of(width: int, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """What a command prints."""
    stdout = Terminal() if width else io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        app(list(words), standalone_mode=False)
    return plain(stdout.getvalue())


def plain(shown: str) -> list[str]:
    return COLORS.sub("", shown).replace("\r\n", "\n").split("\n")


def check(lines: list[str], width: int, *, is_redrawn: bool = False) -> None:
    text = "\n".join(lines)
    assert text.strip()
    if not is_redrawn:
        assert [line for line in lines if line.endswith(" ")] == []
    if not width:
        assert not DRAWN.search(text)
        assert "\x1b" not in text


def configuration(folder: Path) -> Path:
    file = folder / "rollout.json"
    groups = {"main": {"num_engines": 2, "engine": {"kind": "fake", "gpus": 1}}}
    loaded = config(folder, groups, run_id="planned")
    file.write_text(loaded.model_dump_json(exclude_defaults=True))
    return file


def test_these_are_all_commands() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {name.split()[0] for name in COMMANDS} | OTHERS == set(commands)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_plain_lines(
    name: str,
    width: int,
    deployment: DeploymentHandle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = str(RunFolder.of(deployment.config).path)
    groups = write_groups(tmp_path / "groups.jsonl", GROUPS)
    meant = {"RUN": run, "FILE": str(configuration(tmp_path)), "GROUPS": str(groups)}
    words = [meant.get(word, word) for word in COMMANDS[name]]
    if name in ("trace", "report"):  # their files, whose path is longer than a line
        words += ["--out", str(tmp_path / ("long_" * 20 + "name"))]
    lines = lines_of(width, monkeypatch, *words)
    check(lines, width, is_redrawn=name == "top" and width > 0)
    if name in ("trace", "report"):
        assert any(line.startswith(words[-1]) for line in lines)
    if name in ("status", "attach"):
        text = "\n".join(lines)
        shown = set(ADDRESS.findall(text))
        whole = set(ADDRESS.findall("\n".join(lines_of(0, monkeypatch, *words))))
        assert whole
        assert shown == whole


def test_a_pipe_gets_every_update_of_top(
    deployment: DeploymentHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(RunFolder.of(deployment.config).path)
    lines = lines_of(0, monkeypatch, "top", run, "--num", "2", "--every", "0.2")
    assert sum(line.startswith("router http") for line in lines) == 2


def test_stop_prints_the_address_whole(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launched(launch_local, tmp_path, page={"control_key": "its-key"}) as handle:
        page = json.loads(
            (RunFolder.of(handle.config).of_server("policy") / "journal.json").read_text()
        )["page"]
        lines = lines_of(width, monkeypatch, "stop", page, "--key", "its-key", "--yes")
    check(lines, width)
    assert lines[0] == f"stopped: server policy ({page})"


@pytest.mark.parametrize("has_terminal", [False, True])
def test_serve_prints_plain_lines(has_terminal: bool, tmp_path: Path) -> None:
    groups = {"main": {"num_engines": 1, "engine": {"kind": "fake"}}}
    values = config(tmp_path, groups, run_id="served")
    file = tmp_path / "rollout.json"
    file.write_text(values.model_dump_json(exclude_defaults=True))
    reader, writer = pty.openpty() if has_terminal else os.pipe()
    environment = os.environ | {"COLUMNS": "80", "TERM": "xterm"}
    command = [sys.executable, "-m", "rollout", "serve", str(file)]
    with subprocess.Popen(
        command, stdout=writer, stderr=subprocess.DEVNULL, env=environment
    ) as served:
        os.close(writer)
        shown = b""

        def is_serving() -> bool:
            nonlocal shown
            shown += os.read(reader, 10_000)
            return b"stop with Ctrl-C" in shown and shown.endswith(b"\n")

        until(is_serving, "it serves")
        served.send_signal(signal.SIGTERM)
        served.wait(60)
    os.close(reader)
    lines = plain(shown.decode())
    check(lines, 80 if has_terminal else 0)
    assert any(re.fullmatch(r"router http://\S+", line) for line in lines)


def test_a_long_address_is_not_broken(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"http://{'long-name.' * 30}example:30000"
    stdout = Terminal() if width else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    output.show(f"server policy has the router {address}, which serves")
    assert any(f"{address}," in line for line in plain(stdout.getvalue()))


def test_only_a_terminal_gets_a_frame(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal() if width else io.StringIO())
    assert isinstance(output.framed("what", "title", "red"), Panel) is bool(width)


def test_only_a_terminal_gets_the_bar_of_a_phase(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = Terminal() if width else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    span = {"kind": "phase", "source": "policy", "name": "resume", "elapsed_s": 5, "budget_s": 10}
    output.show(render_server({"running": [span]}, "policy"))
    (line,) = [line for line in plain(stdout.getvalue()) if line.startswith("policy: resume")]
    assert line == f"policy: resume {'█' * 12 + '░' * 12 + ' ' if width else ''}5.0 s of 10.0 s"


def test_text_is_no_markup(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = Terminal() if width else io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    output.show("runs/[red]/a: 2 steps")
    assert plain(stdout.getvalue())[0] == "runs/[red]/a: 2 steps"
