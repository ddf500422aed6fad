"""An engine that answers from what older weights computed is fenced before the gate opens.

Each thing that a fake may keep is there with its flaw: with what is done about it nothing stale
leaves, and without it the sentinel fences the engine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from engines.fake import FakeEngine, write_checkpoint
from engines.fake.engine.fake_caches import CACHES, STORES
from engines.fake.engine.fake_weights import DEFAULT_TENSORS
from engines.fake.launcher import FakeLauncher, make_engine, settings_of
from engines.protocol import GenerateReply, PromptImage, TensorInfo
from engines.protocol.old_state import FAKE, OldState, namespace
from rollout.control.engine import probe
from rollout.control.group.server_group import ServerGroup
from rollout.observability.timeline.analysis import slowest_engines
from rollout.rules.lifecycle import Command
from tests.support.builders import push, started_group

TOWER = TensorInfo("visual.patch_embed.proj.weight", "float32", (2, 2))
TENSORS = (*DEFAULT_TENSORS, TOWER)
NAMES = [tensor.name for tensor in TENSORS]
TEXT = {"vocab_size": 1000, "max_position_embeddings": 4096}
SEES = TEXT | {"image_token_id": 9, "vision_start_token_id": 8, "vision_end_token_id": 7}
PROMPT = tuple(range(1, 40))
IMAGE = PromptImage("data:image/png;base64,AAAA", "1f")
STEP = (Command.PAUSE_GENERATION, Command.FLUSH_CACHE)

ENTRIES: dict[str, dict[str, Any]] = {
    "prefix cache": {"prefix_cache": True},
    "storage tier": {"storage_cache": "tier"},
    "embeddings of images": {"image_cache": True},
    "store of embeddings that engines share": {"shared_image_store": "shared"},
    "copies of weights": {"weight_copies": True},
}
"""What a fake may keep -> the option that adds it."""


@pytest.fixture(autouse=True)
def _empty_stores() -> None:
    STORES.clear()


def checkpoint(folder: Path, config: dict[str, Any] | None = None) -> Path:
    path = write_checkpoint(folder, TENSORS)
    (path / "config.json").write_text(json.dumps(SEES if config is None else config))
    return path


def make(spec: Any, endpoint: Any) -> FakeEngine:
    return make_engine(spec, endpoint, tensors=TENSORS, understands_images=True)


async def group_of(
    tmp_path: Path, options: dict[str, Any], config: dict[str, Any] | None = None, **more: Any
) -> tuple[ServerGroup, list[FakeEngine]]:
    engine = {"kind": "fake", "options": options, **more.pop("engine", {})}
    return await started_group(
        2,
        launcher=FakeLauncher(make),
        model_path=str(checkpoint(tmp_path / "model", config)),
        needs_offload=False,
        min_engines=0,
        engine=engine,
        **more,
    )


async def step(group: ServerGroup, version: int) -> Any:
    for command in STEP:
        await group.run(command)
    await group.run(Command.UPDATE_WEIGHTS, push=push(version, NAMES, known=TENSORS))
    await group.run(Command.VERIFY, version=version)
    return await group.run(Command.CONTINUE_GENERATION)


async def ask(engine: FakeEngine, key: str, image: PromptImage | None = None) -> GenerateReply:
    return await engine.generate(
        input_ids=PROMPT, return_logprob=True, logprob_start_len=32, extra_key=key, image=image
    )


async def answer(engine: FakeEngine, version: int) -> Any:
    """What a client's requests get, through the router's names."""
    name = f"{namespace('run', version)}:mine"
    return [(await ask(engine, name, image)).input_logprobs for image in (None, IMAGE)]


def name_no_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(probe, "namespace", lambda run, version: run)


def refuse_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OldState, "why_refused", lambda self, options, *, keeps_embeddings: [])


def disable_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OldState, "variables", lambda self, *, keeps_embeddings: {})


def do_nothing(patch: pytest.MonkeyPatch) -> None:
    """What it forgets is in the engine."""


WITHOUT: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "prefix cache": name_no_version,  # and the engine forgets to clear it
    "storage tier": name_no_version,
    "embeddings of images": disable_nothing,
    "store of embeddings that engines share": refuse_nothing,
    "copies of weights": do_nothing,
}
"""What a fake may keep -> what leaves out what is done about it."""


def test_everything_that_a_fake_may_keep_is_tried() -> None:
    assert list(CACHES) == list(ENTRIES) == list(WITHOUT)


@pytest.mark.parametrize("entry", ENTRIES)
async def test_without_its_treatment_a_stale_entry_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    WITHOUT[entry](monkeypatch)
    group, engines = await group_of(tmp_path, ENTRIES[entry])
    for engine in engines:
        engine.caches.forgets.add(entry)
    if entry == "copies of weights":  # there are no fingerprints of what it was launched with
        assert not (await step(group, 1)).failures
    report = await step(group, 2)
    fenced = {one.engine_id: one.failure for one in report.failures}
    assert fenced.keys() == {"main-0", "main-1"}
    for why in fenced.values():
        assert "answers from state that older weights computed" in why


@pytest.mark.parametrize(
    "entry", [one for one in ENTRIES if one != "store of embeddings that engines share"]
)
async def test_with_its_treatment_nothing_stale_leaves(tmp_path: Path, entry: str) -> None:
    group, engines = await group_of(tmp_path, ENTRIES[entry])
    for version in range(3):
        if version:
            assert not (await step(group, version)).failures
        clean, (like_new, _) = await group_of(tmp_path / str(version), {})
        if version:
            await step(clean, version)
        for engine in engines:
            expected = await answer(like_new, version)
            assert await answer(engine, version) == expected  # computed
            assert await answer(engine, version) == expected  # out of the cache
            if entry == "prefix cache":  # cleared also of what no request can name now
                old = await ask(engine, f"{namespace('run', version - 1)}:mine")
                assert not old.cached_tokens
        await clean.stop()


async def test_a_refused_store_is_refused_when_an_engine_runs(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="shared_image_store: embeddings of images would outlive"):
        await group_of(tmp_path, {"shared_image_store": "shared"})


async def test_two_runs_with_one_storage_tier_never_share_a_page(tmp_path: Path) -> None:
    replies = {}
    for run in ("a", "b"):
        group, (engine, _) = await group_of(tmp_path / run, {"storage_cache": "both"})
        assert all(one.needs_names for one in (await group.status()).engines)
        assert not (await step(group, 1)).failures
        if run == "b":  # other weights under the same number
            await step(group, 2)
        replies[run] = await ask(engine, f"{namespace(run, 1)}:mine")
        again = await ask(engine, f"{namespace(run, 1)}:mine")
        assert again.cached_tokens == 32
        await group.stop()
    assert [reply.cached_tokens for reply in replies.values()] == [0, 0]
    assert replies["a"].input_logprobs != replies["b"].input_logprobs
    assert len(STORES["both"]) > 4


async def test_an_engine_is_asked_once_for_each_set_of_weights(tmp_path: Path) -> None:
    group, (engine, _) = await group_of(tmp_path, {}, TEXT)
    assert num_asked(engine) == 2
    for command in (*STEP, Command.CONTINUE_GENERATION):
        await group.run(command)
    assert num_asked(engine) == 2  # the same weights
    for version in (1, 2):
        await step(group, version)
        assert num_asked(engine) == 2 + 2 * version
    # Its seconds are on the timeline, so that ``rollout trace`` and ``rollout report`` show them.
    spans = group.timeline.since().spans
    assert [one.engine_id for one in spans if one.name == "sentinel"].count("main-0") == 3
    assert slowest_engines(spans)["sentinel"].elapsed_s > 0


@pytest.mark.parametrize(
    "off",
    [
        {"verify": {"sentinel": False}},
        {"update": "frozen"},
        {"config": {"model_type": "fake"}},
    ],
)
async def test_it_can_be_off(tmp_path: Path, off: dict[str, Any]) -> None:
    _, (engine, _) = await group_of(tmp_path, {"prefix_cache": True}, **off)
    assert "generate" not in engine.operations()


async def test_an_engine_that_refuses_the_prompt_is_not_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def short(spec: Any, endpoint: Any) -> FakeEngine:
        return make_engine(spec, endpoint, tensors=TENSORS, context_length=100)

    group, (engine,) = await started_group(
        1, launcher=FakeLauncher(short), model_path=str(checkpoint(tmp_path)), needs_offload=False
    )
    assert "engine main-0: the sentinel does not ask it" in caplog.text
    assert not (await step(group, 1)).failures
    assert num_asked(engine) == 2  # the other is the log-prob check, which a lone engine needs


def num_asked(engine: FakeEngine) -> int:
    rids = [str(call.arguments.get("rid")) for call in engine.calls]
    return sum(rid.startswith(probe.RID_PREFIX) for rid in rids)


async def test_an_engine_that_takes_no_image_is_asked_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class TextOnly(FakeEngine):
        async def generate(self, **request: Any) -> Any:
            if request.get("image") is not None:
                raise self._rejected("generate", "no image here")
            return await super().generate(**request)

    def make_text_only(spec: Any, endpoint: Any) -> FakeEngine:
        return TextOnly(spec.engine_id, **settings_of(spec, endpoint), understands_images=True)

    model = str(checkpoint(tmp_path))
    launcher = FakeLauncher(make_text_only)
    _, (engine,) = await started_group(1, launcher=launcher, model_path=model)
    assert "the sentinel shows it no image" in caplog.text
    assert num_asked(engine) == 2  # the fake that refuses an image does not record that


async def test_an_engine_that_claims_to_have_no_embeddings_and_has_them_is_fenced(
    tmp_path: Path,
) -> None:
    """As an attached engine whose ``engine.env`` says what is not so."""
    group, _ = await group_of(
        tmp_path, {"image_cache": True}, engine={"env": {FAKE.embeddings_variable: "100"}}
    )
    report = await step(group, 1)
    assert {one.engine_id for one in report.failures} == {"main-0", "main-1"}
    assert "sentinel's image prompt differ" in report.failures[0].failure


async def test_a_push_of_the_same_weights_changes_no_log_prob(tmp_path: Path) -> None:
    group, _ = await group_of(tmp_path, {"prefix_cache": True})
    await step(group, 1)
    for command in STEP:
        await group.run(command)
    await group.run(Command.UPDATE_WEIGHTS, push=replace(push(1, NAMES, known=TENSORS), version=2))
    await group.run(Command.VERIFY, version=2)
    assert not (await group.run(Command.CONTINUE_GENERATION)).failures


class Noisy(FakeEngine):
    """Its log-probs through the caches are off by so much, so often; those past them too."""

    off: ClassVar[list[float]] = []

    async def generate(self, **request: Any) -> Any:
        reply = await super().generate(**request)
        off = self.off.pop(0) if self.off else 0.0
        values = tuple(one - off for one in reply.input_logprobs or ())
        return replace(reply, input_logprobs=values)


def make_noisy(spec: Any, endpoint: Any) -> FakeEngine:
    return Noisy(spec.engine_id, **settings_of(spec, endpoint), tensors=TENSORS)


@pytest.mark.parametrize(
    ("off", "drain", "is_fenced"),
    [
        ([0.01, 0, 0, 0], "abort", False),  # another request was in the batch
        ([0.01, 0, 0.01, 0], "abort", True),  # twice, while what is past the caches is equal
        ([0.01, 0, 0.02, 0.03], "abort", False),  # it does not repeat itself any more
        ([0.01, 0, 0.01, 0], "retract", False),
        ([0.3, 0], "retract", True),
    ],
)
async def test_a_small_difference_is_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: list[float], drain: str, is_fenced: bool
) -> None:
    group, (_,) = await started_group(
        1,
        launcher=FakeLauncher(make_noisy),
        model_path=str(checkpoint(tmp_path, TEXT)),
        needs_offload=False,
        min_engines=0,
        engine={"kind": "fake"},
        lifecycle={"drain": drain},
    )
    monkeypatch.setattr(Noisy, "off", off)
    assert bool((await step(group, 1)).failures) is is_fenced


@pytest.mark.parametrize("off", [[math.nan, math.nan], [0, math.inf]])
async def test_an_engine_that_computes_no_numbers_is_fenced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: list[float]
) -> None:
    """Its fingerprints are right, so no log-prob check looks at it."""
    group, _ = await started_group(
        1,
        launcher=FakeLauncher(make_noisy),
        model_path=str(checkpoint(tmp_path, TEXT)),
        needs_offload=False,
        min_engines=0,
        engine={"kind": "fake"},
    )
    monkeypatch.setattr(Noisy, "off", off)
    (failed,) = (await step(group, 1)).failures
    assert "of the sentinel's text prompt that are not finite numbers; push" in failed.failure


async def test_a_store_that_an_earlier_process_filled_is_not_stale(tmp_path: Path) -> None:
    group, _ = await group_of(tmp_path, {"storage_cache": "tier"})
    assert not (await step(group, 1)).failures
    await group.fence("main-1", "for the test")
    assert await group.boot("main-1")
    assert await group.admit("main-1")
    assert not (await step(group, 2)).failures
