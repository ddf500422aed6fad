"""Who answers a request that names no weights, on every path: the adapter that was pushed last.

Each answer is held against transformers, with the weights of the version that it names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import rollout
from rollout.runtime.handle import ServerHandle
from tests.support.chat_models import THINKS_FIRST
from tests.support.lora import (
    BASE,
    answers_on_every_path,
    make_adapter,
    merged_checkpoint,
    of_mixed_list,
)
from tests.support.models import make_plain_model
from tests.support.referee import Answer, Referee

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(120)]
SETTINGS = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_plain_model(tmp_path_factory.mktemp("model") / "base", seed=1)
    (path / "chat_template.jinja").write_text(THINKS_FIRST)
    return path


@pytest.fixture(scope="module")
def policy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerHandle]:
    options = {"enable-lora": True, "max-lora-rank": 4}
    server = {
        "model_path": str(model),
        "weights": {"update": "lora"},
        "groups": {"main": {"engine": {"kind": "embedded", "options": options}}},
        "health": {"recover": False},
    }
    config = {"log_dir": str(tmp_path_factory.mktemp("logs")), "servers": {"policy": server}}
    with rollout.launch(rollout.RolloutConfig.from_dict(config), backend="local") as deployment:
        yield deployment["policy"]


def versions(answers: list[Answer]) -> set[int]:
    return {span.version for one in answers for span in one.spans}


@pytest.mark.slow
def test_the_adapter_answers_what_names_no_weights_and_the_base_what_names_it(
    policy: ServerHandle, model: Path, tmp_path: Path
) -> None:
    weights = {0: model}
    referee = Referee(lambda version: weights[version])

    def check(found: dict[str, list[Answer]], version: int) -> None:
        for path, answers in found.items():
            assert versions(answers) == {version}, path
            assert referee.findings(answers) == [], path
            assert referee.could_tell(answers, list(weights.values())), path

    check(answers_on_every_path(policy, {}), 0)  # there is no adapter yet
    for version in (1, 2):
        adapter = make_adapter(4, version)
        weights[version] = merged_checkpoint(model, adapter, SETTINGS, tmp_path / str(version))
        policy.push(policy.phases.make_push(adapter, version, adapter=SETTINGS)).result(60)
        check(answers_on_every_path(policy, {}), version)
        check(answers_on_every_path(policy, BASE), 0)
        for more in ({}, {"stream": True}):
            of_base, of_adapter = of_mixed_list(policy, "policy", **more)
            check({"mixed": of_base}, 0)
            check({"mixed": of_adapter}, version)
