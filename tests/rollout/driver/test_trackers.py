"""The function of the page ``watch.md`` sends every figure of a step to a double of its client."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest

from tests.support.driving import SAMPLING, always, driving, engines, prompts
from tests.support.pages import run_code
from tests.support.virtual_time import virtual_time

PAGE = "how-to/watch.md"
# What MLflow accepts as the name of a metric.
NAME = re.compile(r"[\w/ .:-]+")


def test_a_tracker_gets_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, dict[str, float]]] = []
    client = SimpleNamespace(
        init=lambda *, project: None, log=lambda metrics, *, step: sent.append((step, metrics))
    )
    monkeypatch.setitem(sys.modules, "trackio", client)
    on_metrics = run_code(PAGE, number=2)["on_metrics"]

    @virtual_time
    async def run() -> None:
        async with driving(engines(0.01), always(1.0), on_metrics=on_metrics) as (driver, client):
            client.weight_version = 1
            await driver.rollout(7, prompts(1), group_size=2, sampling=SAMPLING)

    run()
    figures = {name: value for _, metrics in sent for name, value in metrics.items()}
    assert figures["rollout/reward/mean"] == 1.0
    assert "server/weight_version" in figures
    assert all(
        NAME.fullmatch(name) and isinstance(value, float | int) for name, value in figures.items()
    )
    assert {step for step, _ in sent} == {7}
