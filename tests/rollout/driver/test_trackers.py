"""The lines of the page ``watch.md`` for trackers send every figure of a step to their clients.

The clients themselves are doubles with their signatures.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.driving import SAMPLING, always, driving, engines, prompts
from tests.support.pages import run_code
from tests.support.virtual_time import virtual_time

PAGE = "how-to/watch.md"
# What MLflow accepts as the name of a metric.
NAME = re.compile(r"[\w/ .:-]+")


class Clients:
    """Doubles of the four clients, and what they were sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, dict[str, float]]] = []

    def modules(self) -> dict[str, Any]:
        wandb = SimpleNamespace(init=lambda *, project: SimpleNamespace(log=self._log))
        mlflow = SimpleNamespace(set_experiment=lambda name: None, log_metrics=self._log)
        trackio = SimpleNamespace(init=lambda *, project: None, log=self._log)
        tensorboard = ModuleType("torch.utils.tensorboard")
        tensorboard.SummaryWriter = lambda folder: self  # type: ignore[attr-defined]
        names = {"wandb": wandb, "mlflow": mlflow, "trackio": trackio}
        return names | {
            "torch": ModuleType("torch"),
            "torch.utils": ModuleType("torch.utils"),
            "torch.utils.tensorboard": tensorboard,
        }

    def _log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.sent.append((step, dict(metrics)))

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.sent.append((global_step, {tag: scalar_value}))


@pytest.mark.parametrize("number", [2, 3, 4, 5], ids=["wandb", "mlflow", "trackio", "tensorboard"])
def test_a_tracker_gets_every_figure(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = Clients()
    for name, module in clients.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    on_metrics = run_code(PAGE, number=number)["on_metrics"]

    @virtual_time
    async def run() -> None:
        async with driving(engines(0.01), always(1.0), on_metrics=on_metrics) as (driver, client):
            client.weight_version = 1
            await driver.rollout(7, prompts(1), group_size=2, sampling=SAMPLING)

    run()
    figures = {name: value for _, metrics in clients.sent for name, value in metrics.items()}
    assert figures["rollout/reward/mean"] == 1.0
    assert "server/weight_version" in figures
    assert all(
        NAME.fullmatch(name) and isinstance(value, float | int) for name, value in figures.items()
    )
    steps = {step for step, _ in clients.sent}
    assert steps == ({None} if number == 2 else {7})
    assert number > 2 or figures["rollout/step"] == 7
