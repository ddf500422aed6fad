"""OpenAI's endpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engines.embedded.engine_client import Asker
from tests.support.event_lines import async_lines_of

pytestmark = pytest.mark.embedded
MESSAGES = [{"role": "user", "content": "Say something"}]


async def test_a_chat_is_the_template_and_then_a_completion(engine: Asker) -> None:
    answer = await engine.post(
        "/v1/chat/completions", messages=MESSAGES, temperature=0, max_tokens=8, logprobs=True
    )
    text = "<|im_start|>user\nSay something<|im_end|>\n<|im_start|>assistant\n"
    native = await engine.generate(text=text, max_new_tokens=8)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": native["text"]}
    assert answer["usage"]["prompt_tokens"] == native["meta_info"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == len(choice["logprobs"]["content"])
    assert choice["finish_reason"] == native["meta_info"]["finish_reason"]["type"]


async def chunks_of(engine: Asker, path: str, **body: Any) -> list[dict[str, Any]]:
    async with engine.http.stream("POST", path, json={"stream": True, **body}) as response:
        lines = [line async for line in async_lines_of(response) if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_a_streamed_chat_adds_up_to_the_whole_one(engine: Asker) -> None:
    body: dict[str, Any] = {
        "messages": MESSAGES, "temperature": 0, "max_tokens": 24, "ignore_eos": True,
    }  # fmt: skip
    whole = await engine.post("/v1/chat/completions", **body)
    *parts, usage = await chunks_of(
        engine, "/v1/chat/completions", **body, stream_options={"include_usage": True}
    )
    text = "".join(part["choices"][0]["delta"]["content"] for part in parts)
    assert text == whole["choices"][0]["message"]["content"]
    assert parts[-1]["choices"][0]["finish_reason"] == "length"
    assert usage["usage"] == {
        **whole["usage"],
        "prompt_tokens_details": usage["usage"]["prompt_tokens_details"],
    }


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": [9, 8, 7, 6] * 20}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcd" * 20}]}),
    ],
)
async def test_a_prefix_is_found_only_with_its_key(
    engine: Asker, path: str, prompt: dict[str, Any]
) -> None:
    num_cached = []
    for key in ("a", "b", "a"):
        answer = await engine.post(path, **prompt, max_tokens=1, extra_key=key)
        num_cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert num_cached[:2] == [0, 0]
    assert num_cached[2] >= 64


async def test_completions_take_text_ids_and_batches(engine: Asker) -> None:
    path = "/v1/completions"
    native = await engine.generate(text="abc", max_new_tokens=4)
    for prompt in ("abc", ["abc"], await ids_of(engine, "abc")):
        answer = await engine.post(path, prompt=prompt, temperature=0, max_tokens=4, logprobs=1)
        assert answer["choices"][0]["text"] == native["text"]
    answer = await engine.post(path, prompt=["abc", "def"], n=2, max_tokens=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    parts = await chunks_of(engine, path, prompt="abc", temperature=0, max_tokens=4)
    assert "".join(part["choices"][0]["text"] for part in parts) == native["text"]


async def test_the_tokens_of_a_stream_are_each_told_once_and_counted(engine: Asker) -> None:
    body: dict[str, Any] = {
        "prompt": "abc", "temperature": 0, "max_tokens": 40, "ignore_eos": True, "logprobs": 1,
        "return_token_ids": True, "stream_options": {"continuous_usage_stats": True},
    }  # fmt: skip
    whole = (await engine.post("/v1/completions", **body))["choices"][0]
    parts = await chunks_of(engine, "/v1/completions", **body)
    choices = [part["choices"][0] for part in parts]
    counts = [part["usage"]["completion_tokens"] for part in parts]
    ids: list[int] = []
    logprobs: list[float] = []
    for choice, count in zip(choices, counts, strict=True):
        ids += choice["token_ids"]
        logprobs += choice["logprobs"]["token_logprobs"]
        assert len(ids) == len(logprobs) == count
    assert (ids, count) == (whole["token_ids"], 40)
    assert (
        choices[0]["prompt_token_ids"] == whole["prompt_token_ids"] == await ids_of(engine, "abc")
    )


async def test_a_chat_goes_on_with_the_answer_it_is_given(engine: Asker) -> None:
    begun = {"role": "assistant", "content": "Well, "}
    options = {"temperature": 0, "max_tokens": 8, "continue_final_message": True}
    answer = await engine.post("/v1/chat/completions", messages=[*MESSAGES, begun], **options)
    text = "<|im_start|>user\nSay something<|im_end|>\n<|im_start|>assistant\nWell, "
    native = await engine.generate(text=text, max_new_tokens=8)
    assert answer["choices"][0]["message"]["content"] == native["text"]


async def test_a_whole_chat_tells_its_ids_and_a_streamed_one_refuses(engine: Asker) -> None:
    asks = {"return_token_ids": True, "return_meta_info": True, "logprobs": True}
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, **asks}
    (choice,) = (await engine.post("/v1/chat/completions", **body))["choices"]
    text = "<|im_start|>user\nSay something<|im_end|>\n<|im_start|>assistant\n"
    assert choice["prompt_token_ids"] == await ids_of(engine, text)
    told = choice["meta_info"]["output_token_logprobs"]
    assert [one[1] for one in told] == choice["response_token_ids"]
    assert [one[0] for one in told] == [one["logprob"] for one in choice["logprobs"]["content"]]
    refused = await engine.http.post("/v1/chat/completions", json={**body, "stream": True})
    assert refused.status_code == 400
    assert "return_token_ids" in refused.text


async def ids_of(engine: Asker, text: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(engine.server.model_path)
    ids: list[int] = tokenizer.encode(text)
    return ids


async def test_models_and_the_schema_are_listed(engine: Asker) -> None:
    (model,) = (await engine.get("/v1/models"))["data"]
    assert model["id"] == str(engine.server.model_path)
    assert model["max_model_len"] == 4096
    paths = (await engine.get("/openapi.json"))["paths"]
    assert {"post"} == paths["/begin_weight_update"].keys()
    assert {"get", "post"} == paths["/flush_cache"].keys()


async def test_a_call_that_is_not_served_is_refused_as_json(engine: Asker) -> None:
    unknown = await engine.http.get("/no_such_path")
    assert (unknown.status_code, unknown.json()) == (404, {"detail": "Not Found"})
    wrong = await engine.http.post("/model_info")
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": MESSAGES, "temperature": -1}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 5000}),
    ("/v1/completions", {}),
]


@pytest.mark.parametrize(("path", "body"), WRONG)
async def test_a_wrong_request_is_a_400(engine: Asker, path: str, body: dict[str, Any]) -> None:
    assert await engine.refused(400, path, **body)
