"""How many requests the checks of a step send to an engine; one answer serves both checks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engines.fake import FakeEngine, write_checkpoint
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.launcher import FakeLauncher, settings_of
from engines.kinds import KINDS
from rollout.config import EngineConfig
from rollout.control.group.server_group import ServerGroup
from rollout.rules.lifecycle import OFFLOAD, Command
from tests.support.builders import adapter_push, push, started_group

TEXT = {"vocab_size": 1000, "max_position_embeddings": 4096}
SEES = TEXT | {"image_token_id": 9, "vision_start_token_id": 8, "vision_end_token_id": 7}
SENTINEL = {"by": "version"}
LOGPROBS = {"by": "canary", "sentinel": False}
BOTH = {"by": "canary"}


class Recording(FakeEngine):
    """It records its requests, also those that it refuses."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.requests: list[dict[str, Any]] = []

    async def generate(self, **request: Any) -> Any:
        self.requests.append(request)
        return await super().generate(**request)


def make(spec: Any, endpoint: Any, **more: Any) -> Recording:
    settings = {"understands_images": True, **settings_of(spec, endpoint), **more}
    return Recording(spec.engine_id, **settings)


def make_short(spec: Any, endpoint: Any) -> Recording:
    return make(spec, endpoint, context_length=100)


async def group_of(
    tmp_path: Path, verify: dict[str, Any], config: dict[str, Any], make: Any = make, **more: Any
) -> tuple[ServerGroup, list[Any]]:
    model = write_checkpoint(tmp_path / "model", DEFAULT_TENSORS)
    (model / "config.json").write_text(json.dumps(config))
    return await started_group(
        2,
        launcher=FakeLauncher(make),
        model_path=str(model),
        engine={"kind": "fake"},
        verify=verify,
        **({"needs_offload": False} | more),
    )


async def step(group: ServerGroup, version: int) -> None:
    for command in (Command.PAUSE_GENERATION, Command.FLUSH_CACHE):
        await group.run(command)
    await group.run(Command.UPDATE_WEIGHTS, push=push(version))
    await group.run(Command.VERIFY, version=version)
    assert not (await group.run(Command.CONTINUE_GENERATION)).failures


@pytest.mark.parametrize(
    ("verify", "config", "num"),
    [
        # When each check asked for itself, these were 2, 4, 2, 4 and 6.
        (SENTINEL, TEXT, 2),
        (SENTINEL, SEES, 3),
        (LOGPROBS, TEXT, 1),
        (BOTH, TEXT, 2),
        (BOTH, SEES, 3),
    ],
)
async def test_how_many_requests_a_step_sends_to_an_engine(
    tmp_path: Path, verify: dict[str, Any], config: dict[str, Any], num: int
) -> None:
    group, engines = await group_of(tmp_path, verify, config)
    for version in (1, 2):
        for engine in engines:
            engine.requests.clear()
        await step(group, version)
        assert [len(engine.requests) for engine in engines] == [num, num]
    await group.stop()


async def test_prompts_that_the_user_chose_are_asked_whole(tmp_path: Path) -> None:
    given = {"canary_prompts": (tuple(range(1, 100)), (4, 5, 6))}
    group, (engine, _) = await group_of(tmp_path, LOGPROBS | given, TEXT)
    await step(group, 1)
    assert tuple(request["input_ids"] for request in engine.requests) == given["canary_prompts"]
    assert {request["logprob_start_len"] for request in engine.requests} == {0}
    await group.stop()


async def test_an_adapter_takes_one_request(tmp_path: Path) -> None:
    group, (engine, _) = await group_of(tmp_path, LOGPROBS, TEXT, update="lora")
    await group.stage_adapter(adapter_push(1))
    assert [request["lora_path"] for request in engine.requests] == ["policy@1"]  # two before
    await group.stop()


async def test_an_engine_without_log_probs_through_its_caches_is_asked_as_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers with new tokens, and past the caches also with the log-probs of the prompt."""
    kind = replace(KINDS["fake"], has_part_of_prompt_logprobs=False)
    monkeypatch.setattr(EngineConfig, "of_kind", kind)
    group, (engine, _) = await group_of(tmp_path, BOTH, TEXT)
    engine.requests.clear()
    await step(group, 1)
    through, past = engine.requests
    assert through["logprob_start_len"] is None
    assert past["logprob_start_len"] == len(past["input_ids"]) - 32
    assert [one["sampling_params"].max_new_tokens for one in (through, past)] == [2, 2]
    member = group._engines["main-0"]
    assert [len(values) for values in member.canary[""].logprobs] == [31]
    await group.stop()


async def test_an_engine_with_a_short_context_is_asked_the_beginning(tmp_path: Path) -> None:
    """Its log-probs are those of the same tokens in the whole prompt, of a trainer's too."""
    group, engines = await group_of(tmp_path, BOTH, TEXT, make_short)
    await step(group, 1)
    for engine in engines:
        planted, checked = (request["input_ids"] for request in engine.requests)
        assert (len(planted), len(checked)) == (288, 64)
        assert checked == planted[:64]
        (values,) = group._engines[engine.engine_id].canary[""].logprobs
        assert len(values) == 63
    await group.stop()


async def test_weights_that_a_release_lost_are_not_judged_by_an_old_answer(tmp_path: Path) -> None:
    """Their version is as before, so the sentinel has no new answer for the log-prob check."""
    group, (engine, _) = await group_of(tmp_path, BOTH, TEXT, update="lora", needs_offload=True)
    for command in (*OFFLOAD, Command.ONLOAD_WEIGHTS):
        await group.run(command)
    engine.weights.lose()
    await group.run(Command.VERIFY, version=0)
    await group.run(Command.ONLOAD_KV)
    engine.requests.clear()
    (failed,) = (await group.run(Command.CONTINUE_GENERATION)).failures
    assert failed.engine_id == "main-0"
    assert "when the weights were the same" in failed.failure
    assert len(engine.requests) == 1
    await group.stop()
