"""The dashboard and the alert rules: they load, and ask only for metrics that exist."""

import json
import re
from importlib.resources import files
from typing import Any

import pytest
import yaml

from rollout.page.tallies import METRICS

FOLDER = files("rollout.page") / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana.json").read_text())
ALERTS: dict[str, Any] = yaml.safe_load((FOLDER / "alerts.yaml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
ROUTER = {
    "router_held",
    "router_in_flight",
    "router_gate_seconds_total",
    "router_request_seconds_bucket",
}
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
TOLD = ROUTER | {
    name + suffix for name, (kind, _, _) in METRICS.items() for suffix in SUFFIXES[kind]
}


def asked_for(expression: str) -> set[str]:
    bare = re.sub(r'"[^"]*"', '""', expression)
    return set(re.findall(r"\b(?:rollout|router)_\w+", bare))


@pytest.mark.parametrize("panel", DASHBOARD["panels"], ids=lambda panel: panel["title"])
def test_a_panel_has_what_grafana_needs_and_asks_for_what_is_told(panel: dict[str, Any]) -> None:
    assert {"id", "type", "title", "gridPos", "targets", "fieldConfig", "datasource"} <= set(panel)
    place = panel["gridPos"]
    assert place["x"] + place["w"] <= 24
    for target in panel["targets"]:
        assert asked_for(target["expr"]) <= TOLD, target["expr"]
        assert asked_for(target["expr"])
    refs = [target["refId"] for target in panel["targets"]]
    assert len(set(refs)) == len(refs)


def test_the_dashboard_can_be_imported_anywhere() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {one["name"]: one["type"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "server": "query"}
    # No data source of one installation.
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
def test_an_alert_is_whole_and_asks_for_what_is_told(rule: dict[str, Any]) -> None:
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert asked_for(rule["expr"])
    assert asked_for(rule["expr"]) <= TOLD
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert rule["expr"].count("(") == rule["expr"].count(")")


def test_there_is_an_alert_for_each_thing_that_must_not_go_unseen() -> None:
    assert {rule["alert"].removeprefix("Rollout") for rule in RULES} >= {
        "PhaseStalled",
        "EngineFenced",
        "VersionSkew",
        "GateClosed",
        "StoreLag",
    }
