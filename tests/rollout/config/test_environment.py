"""ROLLOUT_LOG_LEVEL and ROLLOUT_LOG_DIR, in a script, in the commands and for actors."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import rollout
from rollout.config import RolloutConfig
from rollout.config.run_dir import JOURNAL_FILE
from rollout.config.sources.environment import options_of_actors, set_log_level
from rollout.control.server.runs import named_folders, recorded_run
from rollout.core.errors import ConfigError

VALUES = {
    "servers": {"policy": {"model_path": "m", "groups": {"main": {"engine": {"kind": "fake"}}}}}
}
SCRIPT = """
import logging, rollout
try:
    rollout.connect("nowhere")
except rollout.ConfigError as error:
    print(error)
for name in ("rollout", "engines", "other", ""):
    logger = logging.getLogger(name)
    print(name, logger.level, logger.handlers)
"""


@pytest.fixture(autouse=True)
def _levels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("rollout", "engines"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)


def run(*arguments: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_script_gets_the_level_for_our_loggers_and_no_handler(tmp_path: Path) -> None:
    printed = run("-c", SCRIPT, folder=tmp_path, ROLLOUT_LOG_LEVEL="debug").stdout
    assert printed.splitlines()[1:] == ["rollout 10 []", "engines 10 []", "other 0 []", " 30 []"]
    printed = run("-c", SCRIPT, folder=tmp_path, ROLLOUT_LOG_LEVEL="").stdout
    assert printed.splitlines()[1:3] == ["rollout 0 []", "engines 0 []"]


def test_a_command_prints_at_the_level_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(VALUES))
    code = (
        "import sys, logging, rollout.cli.main as main\n"
        "sys.argv = ['rollout', 'version']\n"
        "main.app = lambda: logging.getLogger('rollout.x').debug('a line')\n"
        "main.main()\n"
    )
    assert (
        "DEBUG rollout.x: a line"
        in run("-c", code, folder=tmp_path, ROLLOUT_LOG_LEVEL="DEBUG").stderr
    )
    assert run("-c", code, folder=tmp_path, ROLLOUT_LOG_LEVEL="info").stderr == ""
    done = run("-m", "rollout", "validate", "c.yaml", folder=tmp_path, ROLLOUT_LOG_LEVEL="loud")
    assert done.returncode == 2
    levels = "debug, info, warning, error, critical"
    assert done.stderr == f"rollout: ROLLOUT_LOG_LEVEL = 'loud': must be one of {levels}\n"


def test_a_launch_refuses_a_level_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_LOG_LEVEL", "5")
    with pytest.raises(ConfigError, match="ROLLOUT_LOG_LEVEL = '5'"):
        rollout.launch(RolloutConfig.from_dict(VALUES))


def test_actors_get_the_level_of_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_LOG_LEVEL", raising=False)
    assert (options_of_actors(), set_log_level()) == ({}, False)
    monkeypatch.setenv("ROLLOUT_LOG_LEVEL", "error")
    assert options_of_actors() == {"runtime_env": {"env_vars": {"ROLLOUT_LOG_LEVEL": "error"}}}
    assert set_log_level()
    assert logging.getLogger("engines").level == logging.ERROR


def test_actors_that_export_spans_get_the_variables_without_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in os.environ if name.startswith(("OTEL_", "ROLLOUT_LOG"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=a-key")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=a-key")
    assert options_of_actors() == {}
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}
    expected = {"runtime_env": {"env_vars": variables}}
    assert options_of_actors(exports_spans=True) == expected


def test_the_folder_of_runs_is_the_default_and_commands_search_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLOUT_LOG_DIR", str(tmp_path / "logs"))
    assert RolloutConfig.from_dict(VALUES).log_dir == str(tmp_path / "logs")
    assert RolloutConfig.from_dict(VALUES | {"log_dir": "here"}).log_dir == "here"
    assert named_folders("a")[1] == tmp_path / "logs/a"
    with pytest.raises(ConfigError, match=f"no run a; there is no {tmp_path}/logs"):
        recorded_run(Path("a"))
    (tmp_path / "logs/a/policy").mkdir(parents=True)
    (tmp_path / "logs/a/policy" / JOURNAL_FILE).write_text("{}")
    assert recorded_run(Path("a")) == tmp_path / "logs/a"
    monkeypatch.setenv("ROLLOUT_LOG_DIR", "")
    assert RolloutConfig.from_dict(VALUES).log_dir == "runs"
