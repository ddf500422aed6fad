"""The dashboard and the alert rules: they load, and use only metrics that exist."""

import json
import re
from importlib.resources import files
from typing import Any

import pytest
import yaml

from tests.support.promql import labels_of

FOLDER = files("rollout.observability.page") / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]


def bare(expression: str) -> str:
    """The expression without Grafana's variables."""
    return expression.replace("$server", ".*")


def named_in(text: str) -> set[str]:
    """The labels in a legend or an annotation."""
    return set(re.findall(r"{{\s*(?:\$labels\.)?(\w+)\s*}}", text))


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_a_panel_has_what_grafana_needs_and_uses_exported_metrics(panel: dict[str, Any]) -> None:
    assert {"id", "type", "title", "gridPos", "targets", "fieldConfig", "datasource"} <= set(panel)
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24
    for target in panel["targets"]:
        assert named_in(target["legendFormat"]) <= labels_of(bare(target["expr"]))
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "server": "query"}
    # No data source of a specific installation.
    assert set(re.findall(r'"uid": "([^"]*)"', json.dumps(DASHBOARD))) == {
        "${datasource}",
        "ray-rollout",
    }


def test_no_two_panels_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (place["x"] + across, place["y"] + down)
            for across in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_complete_and_uses_exported_metrics(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    texts = " ".join(rule["annotations"].values())
    assert named_in(texts.replace("{{ $value }}", "")) <= labels_of(rule["expr"])
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}


@pytest.mark.parametrize(
    "wrong",
    ["rollout_uq", 'rollout_up{engine="x"}', "sum by (engine) (rollout_up)", "rollout_up ++"],
)
def test_an_unknown_metric_or_label_would_be_found(wrong: str) -> None:
    with pytest.raises((AssertionError, ValueError)):
        labels_of(wrong)


def test_there_is_an_alert_for_each_critical_condition() -> None:
    assert {rule["alert"].removeprefix("Rollout") for rule in RULES} >= {
        "PhaseStalled",
        "EngineFenced",
        "VersionSkew",
        "GateClosed",
        "StoreLag",
    }
