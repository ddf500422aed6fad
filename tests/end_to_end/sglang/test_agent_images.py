"""An agent that looks at images, over real SGLang: its ids over turns, and its log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from safetensors.torch import load_file

from rollout.core.samples import Sample
from rollout.runtime.local import launch_local
from tests.support.qwen3_vl import Qwen3VlReference, file_of, make_qwen3_vl, noise, part_of
from tests.support.real_policy import one_engine, real_config

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]
NUM_TOKENS = 8
SEES = "<|vision_start|><|image_pad|><|vision_end|>"


def gap(sample: Sample, reference: Qwen3VlReference, images: Sequence[Any]) -> float:
    """The largest difference of the sampled tokens' log-probs from those of transformers."""
    theirs = reference.logprobs([*sample.prompt_ids, *sample.output_ids], images)
    pairs = zip(sample.output_logprobs, theirs[len(sample.prompt_ids) - 1 :], strict=True)
    return max(
        abs(one - other) for (one, other), mask in zip(pairs, sample.mask, strict=True) if mask
    )


def ask_of(session: Any) -> Callable[..., Any]:
    """Asks in a session, greedily."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    return partial(
        client.chat.completions.create, model="policy", max_tokens=NUM_TOKENS, temperature=0
    )


def test_an_image_seen_before_a_push_is_seen_by_the_new_model_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sentinel, which shows each engine an image before and after the push, lets it serve."""
    models = [make_qwen3_vl(tmp_path / f"model-{seed}", seed) for seed in range(2)]
    image = noise(0, 2, 3)
    messages = [{"role": "user", "content": [part_of(image)]}]
    found = []
    config = real_config(models[0], tmp_path, {"main": one_engine()})
    with launch_local(config) as deployment:
        policy = deployment["policy"]
        for version in range(2):
            if version:
                with policy.offloaded() as window:
                    window.push(load_file(models[1] / "model.safetensors"), version=1)
            with policy.session() as session:
                ask_of(session)(messages=messages)
                found += session.samples().result(60)
    assert "shows it no image" not in caplog.text
    gaps = [[gap(one, Qwen3VlReference(path), [image]) for path in models] for one in found]
    assert gaps[0][0] < 1e-3 < 0.1 < gaps[0][1], gaps
    assert gaps[1][1] < 1e-3 < 0.1 < gaps[1][0], gaps


def test_turns_with_images_have_the_ids_that_sglang_computed(tmp_path: Path) -> None:
    model = make_qwen3_vl(tmp_path / "model", seed=1)
    reference = Qwen3VlReference(model)
    images = [noise(0, 2, 2), noise(1, 3, 4), noise(2, 6, 4)]
    config = real_config(model, tmp_path, {"main": one_engine()})
    with launch_local(config) as deployment, deployment["policy"].session() as session:
        asks = ask_of(session)

        def ask(messages: list[Any], **more: Any) -> Any:
            return asks(messages=messages, **more)

        def says(text: str) -> dict[str, Any]:
            return {"type": "text", "text": text}

        first = [says("look "), part_of(images[0]), says(" and "), part_of(images[1]), says(".")]
        history: list[Any] = [{"role": "user", "content": first}]
        replies = [ask(history)]
        history += [replies[0].choices[0].message.model_dump(exclude_none=True)]
        history += [{"role": "user", "content": [part_of(images[2]), says("more")]}]
        *_, last = ask(history, stream=True)
        assert last.session["turn"] == 1
        turns = session.turns().result(60)
        history += [{"role": "assistant", "content": turns[1]["text"]}]
        history += [{"role": "user", "content": "And now?"}]
        replies.append(ask(history))
        # Another image in the place of the first one is another conversation.
        other = noise(3, 2, 2)
        ask([{"role": "user", "content": [*first[:1], part_of(other), *first[2:]]}])
        far = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
        with pytest.raises(openai.BadRequestError, match="must be a data URL"):
            ask([{"role": "user", "content": [far]}])
        with pytest.raises(openai.BadRequestError, match="2 times for 1 images"):
            ask([{"role": "user", "content": [part_of(other), says(" <|image_pad|>")]}])
        turns = session.turns().result(60)
        whole, branch = session.samples().result(60)
    assert [turn["parent"] for turn in turns] == [None, 0, 1, None]
    assert [turn["drift"] for turn in turns] == ["clean", "realigned", "realigned", "clean"]
    asked = f"<|im_start|>user\nlook {SEES} and {SEES}.<|im_end|>\n<|im_start|>assistant\n"
    assert whole.prompt_ids == turns[0]["prompt_ids"] == reference.ids(asked, images[:2])
    more = f"<|im_end|>\n<|im_start|>user\n{SEES}more<|im_end|>\n<|im_start|>assistant\n"
    assert turns[1]["prompt_ids"] == reference.ids(more, images[2:])
    sampled = [turn["output_ids"] for turn in turns[:3]]
    later = turns[1]["prompt_ids"], turns[2]["prompt_ids"]
    assert whole.output_ids == [*sampled[0], *later[0], *sampled[1], *later[1], *sampled[2]]
    assert sum(whole.mask) == 3 * NUM_TOKENS
    assert turns[2]["cached_tokens"] > len(whole.prompt_ids)  # the images of the others, too
    usage = replies[1].usage
    assert usage.prompt_tokens == len(whole.prompt_ids) + len(whole.output_ids) - NUM_TOKENS
    names = [sha256(file_of(image)).hexdigest() for image in (*images, other)]
    assert whole.metadata["images"] == names[:3]
    assert branch.metadata["images"] == [names[3], names[1]]
    assert gap(whole, reference, images) < 1e-3
    assert gap(branch, reference, [other, images[1]]) < 1e-3
    assert gap(branch, reference, images[:2]) > 0.1  # so the images do matter
