"""Each ``rollout`` line of a page's shell blocks runs as it is printed, here or in a named test."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config.run_dir import RunFolder
from rollout.runtime.local import launch_local
from tests.support.builders import write_checkpoint
from tests.support.paged import step, until
from tests.support.pages import code_of
from tests.support.served_fakes import launched

ROOT = Path(__file__).parents[3]
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "engines/fake/README.md"]

# Lines by their begin -> the test that runs them, or what they need.
ELSEWHERE = {
    "rollout serve rollout.yaml": "tests/rollout/cli/test_commands.py",
    "rollout serve base.yaml cluster.yaml": "tests/rollout/config/test_sources.py",
    "rollout debug ": "tests/rollout/cli/test_debug.py",
    "rollout serve fakes.yaml": "tests/engines/fake/test_readme_of_fake.py",
    "rollout stop --yes": "tests/rollout/cli/test_commands.py",
    "rollout quickstart": "tests/test_distributions.py",
    "rollout status colocated-grpo-1 --ray": "tests/end_to_end/test_ray_job.py",
    "rollout doctor colocated-grpo-1 --ray": "tests/end_to_end/test_ray_job.py",
    "rollout stop colocated-grpo-1 --ray": "tests/end_to_end/test_ray_job.py",
    "rollout doctor my-run --ray": "tests/end_to_end/test_ray_job.py",
    "rollout attach runs/my-run --clean-up": "tests/end_to_end/test_driver_crash.py",
}
ENDLESS = ("rollout top",)


def lines() -> list[str]:
    """Without comments, each once."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
    all_blocks = (found for page in PAGES for found in fenced.findall(page.read_text()))
    blocks = [text for language, text in all_blocks if language in ("", "sh")]
    found = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(line for line in found if line.startswith("rollout ")))


HERE = [line for line in lines() if not line.startswith(tuple(ELSEWHERE))]


def test_a_line_that_is_not_run_here_has_its_test_or_a_reason() -> None:
    for begin, where in ELSEWHERE.items():
        assert any(line.startswith(begin) for line in lines()), begin
        assert where.startswith("needs ") or (ROOT / where).exists(), where
    assert len(HERE) > 10


def run(line: str) -> str:
    """The output; behind ``>`` it goes into a file."""
    words = shlex.split(line)[1:]
    target = ""
    if words[-2:-1] == [">"]:
        *words, _, target = words
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{line}: {result.output}{result.exception}"
    if target:
        Path(target).write_text(result.stdout)
    return result.output


def test_the_lines_of_the_pages_run_as_they_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    values = yaml.safe_load(code_of("getting-started.md", "yaml"))
    values["servers"]["policy"] |= {"model_path": write_checkpoint(tmp_path)}
    values["servers"]["policy"]["groups"]["main"]["engine"] = {"kind": "fake"}
    Path("rollout.yaml").write_text(yaml.safe_dump(values))
    Path("cluster.yaml").write_text("cluster: {namespace: mine}")
    Path("runs").mkdir()
    with launched(launch_local, tmp_path / "runs", run_id="my-run") as deployment:
        step(deployment["policy"], 1)
        until(lambda: bool(RunFolder.of(deployment.config).span_files()), "the step is recorded")
        for line in HERE:
            run(f"{line} --num 1" if line in ENDLESS else line)
    for name in ("doctor", "status", "attach"):
        assert json.loads(Path(f"{name}.json").read_text())
    assert "properties" in json.loads(Path("rollout.schema.json").read_text())
