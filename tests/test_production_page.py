"""The checklist for production names settings, alerts, pages and checks that exist."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from rollout.cli.main import app
from rollout.config import ServerConfig
from tests.support.builders import write_checkpoint

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "production.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| do")]


def test_each_line_of_the_checklist_has_a_check_and_a_page_that_exists() -> None:
    lines = [row.strip("| ").split(" | ") for row in ROWS if "](" in row]
    assert len(lines) > 20
    for _, check, page in lines:
        assert check
        for target in re.findall(r"\]\(([^)]+)\)", page):
            name, _, anchor = target.partition("#")
            titles = re.findall(r"^#+ (.+)$", (DOCS / name).read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert not anchor or anchor in anchors, target


def test_each_setting_and_alert_exists() -> None:
    schema = json.dumps(ServerConfig.model_json_schema())
    named = re.findall(r"`(?:router|page|weights|health|engine|lifecycle)\.(\w+)`", PAGE)
    assert len(named) > 6
    assert [name for name in named if f'"{name}"' not in schema] == []
    rules = yaml.safe_load(
        (DOCS.parent / "rollout/observability/page/monitoring/alerts.yaml").read_text()
    )
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    found = set(re.findall(r"`(Rollout[A-Z]\w+)`", PAGE))
    assert found
    assert found <= alerts
    assert ServerConfig.model_validate(
        {"model_path": "m", "groups": {"main": GROUP}}
    ).health.recover


GROUP: dict[str, Any] = {"engine": {"kind": "fake", "gpus": 0}}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"page": {"host": "0.0.0.0"}}, "set page.key"),
        ({"router": {"clint_key": "x"}}, "client_key"),
    ],
    ids=["an open page", "a setting that a new version does not have"],
)
def test_validate_finds_what_the_page_says(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    server = {"model_path": write_checkpoint(tmp_path), "groups": {"main": GROUP}} | changes
    file = tmp_path / "rollout.yaml"
    file.write_text(yaml.safe_dump({"servers": {"policy": server}}))
    done = CliRunner().invoke(app, ["validate", str(file)])
    assert done.exit_code == 2
    assert why in done.output
