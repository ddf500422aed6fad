"""The samples of a step that people read are few, short, and from the best to the worst."""

from __future__ import annotations

import json

from engines.protocol import VersionSpan
from rollout.core.samples import EngineSpan, Sample, SampleFailure, SampleGroup
from rollout.driver.stream.shown_samples import MOST, shown_samples
from rollout.router.proxy.figures import StepMetrics


def groups(*rewards: float | None) -> list[SampleGroup]:
    return [
        SampleGroup(index, [Sample([1, 2], text=str(reward), reward=reward)])
        for index, reward in enumerate(rewards)
    ]


def test_they_are_spread_from_the_highest_reward_to_the_lowest() -> None:
    found = shown_samples(groups(0.5, None, 1.0, 0.0, 0.25, 0.75), 3)
    assert [one["reply"] for one in found] == ["1.0", "0.5", "None"]
    assert len(shown_samples(groups(*[0.0] * 50), 99)) == MOST
    assert shown_samples(groups(1.0), 0) == shown_samples([], 4) == []
    assert len(shown_samples(groups(1.0), 4)) == 1


def test_one_has_what_people_ask_of_it() -> None:
    sample = Sample(
        [7] * 40,
        [3, 4],
        [0.0, 0.0],
        text="no",
        weight_versions=(VersionSpan("4", 0, 1), VersionSpan("5", 1, 2)),
        engines=(EngineSpan("main-0", 0, 1), EngineSpan("main-1", 1, 2)),
        reward=0.5,
    )
    (shown,) = shown_samples([SampleGroup(0, [sample])], 1)
    assert shown == {
        "prompt": f"ids {' '.join(['7'] * 32)} …",
        "reply": "no",
        "reward": 0.5,
        "tokens": 2,
        "engines": ["main-0", "main-1"],
        "versions": [4, 5],
        "status": "",
    }
    sample.metadata["question"] = "why?"
    sample.fail("reward raised KeyError('x')", failure=SampleFailure.REWARD_ERROR)
    (shown,) = shown_samples([SampleGroup(0, [sample])], 1)
    assert (shown["prompt"], shown["status"]) == ("why?", "reward raised KeyError('x')")


def test_long_texts_are_cut_and_stay_within_the_bounds_of_the_router() -> None:
    text = "\U0001f600" * 100_000
    samples = [Sample([1] * 9999, text=text, metadata={"prompt": text}) for _ in range(MOST)]
    shown = shown_samples([SampleGroup(0, samples)], MOST)
    assert shown[0]["reply"].endswith("… (100000 characters)")
    raw = json.dumps(shown)
    assert len(raw) < 256 << 10
    kept = StepMetrics()
    kept.put({"step": 1, "samples": json.loads(raw)}, len(raw))
    assert kept.last()[0]["samples"] == shown
