"""What pushes leave as it was, as its users see it: log, report, doctor, status, page, metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from engines.protocol import SamplingParams
from rollout import Driver, Prompt, RolloutConfig, launch
from rollout.cli.main import app
from rollout.core.types import StepReport, UnchangedWeights
from rollout.runtime.handle import DeploymentHandle
from rollout.testing.tiny_model import make_tiny_model
from rollout.weights.push.unchanged import NUM_PUSHES
from tests.support.paged import page_of

pytestmark = [pytest.mark.embedded, pytest.mark.slow]
SAMPLING = SamplingParams(max_new_tokens=4, temperature=0.0)
Named = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3", dtype="bfloat16")


@pytest.fixture
def model(model_path: Path) -> Named:
    model: Any = AutoModelForCausalLM.from_pretrained(model_path)
    return {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.fixture(params=[False, True], ids=["copied", "streamed"])
def weights(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"stream": request.param}


@pytest.fixture
def verify() -> dict[str, Any]:
    return {}


@pytest.fixture
def deployment(
    model_path: Path, weights: Mapping[str, Any], verify: Mapping[str, Any], tmp_path: Path
) -> Iterator[DeploymentHandle]:
    server = {
        "model_path": str(model_path),
        "weights": dict(weights),
        "verify": dict(verify),
        "groups": {"main": {"engine": {"kind": "embedded"}}},
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    with launch(config, backend="local") as deployment:
        yield deployment


def pushed(deployment: DeploymentHandle, model: Named, num: int, *kept: str) -> list[StepReport]:
    """The reports of so many pushes, each of other values but for the kept names."""
    reports = []
    for _ in range(num):
        reports.append(deployment["policy"].push(model).result(60))
        for name, one in model.items():
            if not any(text in name for text in kept):
                one.mul_(1.01)
    return reports


def seen(deployment: DeploymentHandle, run: Path) -> tuple[list[str], int, str, float, float]:
    """What doctor finds and its exit status, the text of ``status``, and two metrics: that of
    ``on_metrics``, that of the page."""
    found = CliRunner().invoke(app, ["doctor", str(run), "--json"])
    (report,) = json.loads(found.output)
    status = CliRunner().invoke(app, ["status", str(run)], env={"COLUMNS": "1000"}).output
    metrics: dict[str, float] = {}
    with Driver(
        deployment["policy"].url, on_metrics=lambda step, figures: metrics.update(figures)
    ) as driver:
        driver.rollout(0, [Prompt([1, 2, 3])], group_size=1, sampling=SAMPLING).result(60)
    with page_of(deployment.config) as page:
        state = page.get("/api/state?fresh=1").json()
        lines = page.get("/metrics").text.splitlines()
    whats = [finding["what"] for finding in report["findings"]]
    assert [finding["what"] for finding in state["findings"]] == whats
    (exported,) = [one for one in lines if one.startswith("rollout_unchanged_tensors{")]
    return (
        whats,
        found.exit_code,
        status,
        metrics["server/unchanged_tensors"],
        float(exported.rpartition(" ")[2]),
    )


def test_pushes_of_the_same_weights_are_a_finding(
    deployment: DeploymentHandle, model: Named, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        reports = pushed(deployment, model, 5, "")
    assert [len(report.unchanged or ()) for report in reports] == [0, 0, 1, 1, 1]
    (finding,) = reports[-1].unchanged or ()
    logged = [one.getMessage() for one in caplog.records if "changed nothing" in one.getMessage()]
    assert len(logged) == 1
    assert all(text in logged[0] for text in ("policy", *finding.causes, *finding.advice))
    whats, status, text, of_driver, of_page = seen(deployment, tmp_path)
    assert (whats, status) == ([finding.what], 3)
    assert "the last 4 pushes changed nothing" in text
    assert of_driver == of_page == len(model)


def test_attention_that_stays_as_it_was_is_a_finding_that_names_it(
    deployment: DeploymentHandle, model: Named, tmp_path: Path
) -> None:
    reports = pushed(deployment, model, NUM_PUSHES + 1, "self_attn")
    assert [len(report.unchanged or ()) for report in reports] == [0] * NUM_PUSHES + [1]
    whats, status, text, of_driver, of_page = seen(deployment, tmp_path)
    assert status == 3
    assert "model.layers.*.self_attn.*" in whats[0]
    assert whats[0] in text
    assert of_driver == of_page == sum("self_attn" in name for name in model)


def test_weights_that_change_are_none(
    deployment: DeploymentHandle, model: Named, tmp_path: Path
) -> None:
    assert all(one.unchanged == () for one in pushed(deployment, model, NUM_PUSHES + 2))
    whats, status, _, of_driver, of_page = seen(deployment, tmp_path)
    assert (status, of_driver, of_page) == (0, 0.0, 0.0)
    assert "nothing is wrong" in whats[0]


@pytest.mark.parametrize(
    ("weights", "verify", "unchanged"),
    [
        ({"frozen": ["model.layers.*.self_attn.*"]}, {}, ()),
        ({}, {"fingerprints": False}, None),
    ],
)
def test_what_is_frozen_or_not_known_is_none(
    deployment: DeploymentHandle, model: Named, unchanged: tuple[()] | None
) -> None:
    reports = pushed(deployment, model, NUM_PUSHES + 2, "self_attn")
    assert {one.unchanged for one in reports} == {unchanged}


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def test_an_adapter_of_zeros_is_a_finding_and_one_that_is_trained_is_none(
    model_path: Path, tmp_path: Path
) -> None:
    """It is in one of two layers: engines get zeros for the other."""
    options = {"enable-lora": True, "max-lora-rank": 8}
    server = {
        "model_path": str(model_path),
        "weights": {"update": "lora"},
        "groups": {"main": {"engine": {"kind": "embedded", "options": options}}},
    }
    config = RolloutConfig.from_dict({"log_dir": str(tmp_path), "servers": {"policy": server}})
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {
        f"{module}.lora_A.weight": torch.randn(4, 64),
        f"{module}.lora_B.weight": torch.zeros(64, 4),
    }
    with launch(config, backend="local") as deployment:
        policy = deployment["policy"]

        def unchanged() -> tuple[UnchangedWeights, ...] | None:
            made = policy.phases.make_push(adapter, adapter=LORA)
            return policy.push(made).result(60).unchanged

        found = [unchanged() for _ in range(3)]
        assert [len(one or ()) for one in found] == [0, 0, 1]
        (finding,) = found[-1] or ()
        assert "every lora_B is zero" in finding.what
        assert policy.status().result(30).unchanged == found[-1]
        for _ in range(NUM_PUSHES + 2):
            for one in adapter.values():
                one.add_(0.5)
            assert unchanged() == ()
