"""Families of models: their renderers are found, and answers and next turns fit these."""

from __future__ import annotations

import json
from array import array
from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.protocol import FinishReason, GenerateReply
from rollout.agents.model.chat_tokenizer import Unchecked, check_client
from rollout.agents.model.families import ChatModel, load_chat_model
from rollout.agents.plan import Ended, make_plan, new_id, read_in, read_reply, reading_of
from rollout.agents.turns.tree import IDS, Generated, Known, TurnTree
from rollout.agents.wire.chat_request import ChatRequest
from rollout.agents.wire.messages import BadChat, history_of, read_messages
from rollout.core.errors import ConfigError
from tests.support.chat_models import THINKING, write_chat_model
from tests.support.family_models import FAMILY_MODELS
from tests.support.tool_families import ARGUMENTS, TOOLS

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("renderers")

NAMES = list(FAMILY_MODELS)
USER = {"role": "user", "content": "2+2?"}
CALL = {
    "id": "functions.add:0",
    "type": "function",
    "function": {"name": "add", "arguments": ARGUMENTS},
}
RESULT = {"role": "tool", "tool_call_id": CALL["id"], "name": "add", "content": "sum=4"}


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def load(name: str) -> ChatModel:
        folder = FAMILY_MODELS[name].write(tmp_path_factory.mktemp(name))
        return load_chat_model(str(folder), name)

    return load


ENDS = {"glm4moe": "<|user|>", "llama3_2": "<|eot_id|>", "gptoss": "<|return|>"}
HARMONY = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>")


def write_templated(folder: Path, name: str) -> Path:
    """A folder with one of TRL's copies of real templates; skips where TRL is not."""
    trl = find_spec("trl")  # it is not imported, which would load torch
    if trl is None or trl.origin is None:
        pytest.skip("TRL is not installed")
    text = (Path(trl.origin).parent / "chat_templates" / f"{name}.jinja").read_text()
    special = [one for model in FAMILY_MODELS.values() for one in model.special]
    end = ENDS.get(name, "<|im_end|>")
    write_chat_model(folder, text, special=list(dict.fromkeys([*special, *HARMONY])), eos=end)
    file = folder / "tokenizer_config.json"
    more = {"bos_token": "<|begin_of_text|>"}
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    return folder


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def load(name: str) -> ChatModel:
        return load_chat_model(str(write_templated(tmp_path_factory.mktemp(name), name)))

    return load


def renderer_of(model: ChatModel) -> Any:
    assert model.family is not None
    return model.family.renderer()


def answer_ids(name: str, model: ChatModel, prompt: list[int], answer: Any) -> list[int]:
    """What a model has to generate for this answer, with the token that ends it."""
    renderer = renderer_of(model)
    whole = renderer.render_ids([USER, answer], tools=TOOLS)
    assert whole[: len(prompt)] == prompt
    ids: list[int] = whole[len(prompt) :]
    if ends := FAMILY_MODELS[name].next_turn:
        return [*ids, model.chat.added[ends["tool_calls" in answer]]]
    stops = set(renderer.get_stop_token_ids())
    return ids[: next(at for at, one in enumerate(ids) if one in stops) + 1]


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_read_as_its_renderer_writes_it_and_the_next_turn_follows(
    model_of: Any, name: str, is_called: bool
) -> None:
    model: ChatModel = model_of(name)
    renderer = renderer_of(model)
    answer: dict[str, Any] = {"role": "assistant", "content": "I add."}
    if name == "llama-3" and is_called:
        answer["content"] = ""  # it writes no text beside a call
    if FAMILY_MODELS[name].thinks:
        answer["reasoning_content"] = "It is a sum."
    if is_called:
        answer["tool_calls"] = [CALL]
    prompt = renderer.render_ids([USER], tools=TOOLS, add_generation_prompt=True)
    ids = answer_ids(name, model, prompt, answer)
    plan = make_plan(model, ChatRequest([USER], tools=TOOLS), history_of([USER], TOOLS), Known())
    assert json.loads(plan.body)["input_ids"] == prompt
    reading = reading_of(model, plan)
    reading.feed(ids)
    read = reading.end()
    assert read.content == answer["content"]
    assert read.reasoning == answer.get("reasoning_content", "")
    arguments = [json.loads(call["function"]["arguments"]) for call in read.calls]
    assert arguments == ([ARGUMENTS] if is_called else [])
    parsed = renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt)
    thinking = (parsed.reasoning_content or "").strip()
    assert (parsed.content.strip(), thinking) == (read.content, read.reasoning)
    assert [call.arguments for call in parsed.tool_calls] == arguments
    new = [RESULT] if is_called else [USER]
    known = array(IDS, prompt + ids)
    bridged = model.bridged(known, len(ids), new, TOOLS, {})
    whole = renderer.render_ids([USER, answer, *new], tools=TOOLS, add_generation_prompt=True)
    assert bridged is not None
    if is_called or not FAMILY_MODELS[name].thinks:  # templates drop thinking before a question
        assert prompt + ids + bridged == whole
    else:
        assert whole[-len(bridged) :] == bridged


TEXTS = st.sampled_from(["", "a", "é\n", "<think>", "</think>", "<tool_call>{", "  "])
TURNS = st.lists(
    st.tuples(TEXTS, TEXTS, st.sampled_from([None, 0, 2, 5]), st.booleans()),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", NAMES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(turns=TURNS)
def test_the_prompt_of_a_turn_begins_with_the_ids_of_the_turn_it_continues(
    model_of: Any, name: str, turns: list[tuple[str, str, int | None, bool]]
) -> None:
    """Whatever a model generated, and wherever its answer was cut off."""
    model: ChatModel = model_of(name)
    tree, messages = TurnTree(), list[dict[str, Any]]()
    end = model.chat.added[FAMILY_MODELS[name].end]
    for question, text, cut, is_kept in turns:
        messages.append({"role": "user", "content": question})
        read = read_messages(messages)
        history = history_of(read, None)
        known = tree.known(history)
        plan = make_plan(model, ChatRequest(read), history, known)
        sent = json.loads(plan.body)["input_ids"]
        assert (known.parent is None) == (len(messages) == 1)
        if plan.prompt.parent is None:  # no renderer ends an answer that ends in its thinking
            is_forked = known.parent is not None
            assert (plan.prompt.drift == "forked") == is_forked
            new = read[known.num_known :]
            assert not is_forked or model.bridged(known.ids, known.num_answer, new, [], {}) is None
        else:
            assert sent[: len(known.ids)] == known.ids.tolist()
            assert plan.prompt.parent == known.parent
        ids = [*model.chat.encode(text), end][:cut]
        reading = reading_of(model, plan)
        reading.feed(ids)
        answer = reading.end()
        matched = end if ids[-1:] == [end] else None
        finish = FinishReason("stop" if matched else "length", matched)
        made = Generated(ids, [0.0] * len(ids), (), finish, answer.content)
        message = answer.message()
        tree.add(tree.made(plan.history, plan.prompt, made, message))
        if not is_kept:  # clients drop the thinking
            message.pop("reasoning_content", None)
        messages.append(message)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "llama3_2", "gptoss"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(turns=TURNS)
def test_it_does_also_where_the_chat_template_drops_thinking(
    templated: Any, name: str, turns: list[tuple[str, str, int | None, bool]]
) -> None:
    """What the renderer does not show, the template does: no turn is tokenised again."""
    model: ChatModel = templated(name)
    tree, messages = TurnTree(), list[dict[str, Any]]()
    (end,) = model.chat.encode(model.chat.special_tokens["eos_token"])
    for question, text, cut, is_kept in turns:
        messages.append({"role": "user", "content": question})
        read = read_messages(messages)
        history = history_of(read, None)
        known = tree.known(history)
        plan = make_plan(model, ChatRequest(read), history, known)
        sent = json.loads(plan.body)["input_ids"]
        assert (known.parent is None) == (len(messages) == 1)
        assert plan.prompt.parent == known.parent
        assert sent[: len(known.ids)] == known.ids.tolist()
        whole = model.bound(None, {}).render(model.as_rendered(read), for_answer=True)
        assert (plan.prompt.drift == "clean") == (sent == model.chat.encode(whole))
        ids = [*model.chat.encode(text), end][:cut]
        reading = reading_of(model, plan)
        reading.feed(ids)
        matched = end if ids[-1:] == [end] else None
        finish = FinishReason("stop" if matched else "length", matched)
        message = reading.end().message()
        made = Generated(ids, [0.0] * len(ids), (), finish, "")
        tree.add(tree.made(plan.history, plan.prompt, made, message))
        if not is_kept:  # clients drop the thinking
            message.pop("reasoning_content", None)
        messages.append(message)


@pytest.mark.parametrize("name", NAMES)
@given(
    text=st.lists(TEXTS, max_size=4).map("".join),
    before=TEXTS,
    is_ended=st.booleans(),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_a_next_turn_needs_the_end_of_the_prompt_alone(
    model_of: Any, name: str, text: str, before: str, is_ended: bool
) -> None:
    """So that no long history is copied for it."""
    model: ChatModel = model_of(name)
    renderer = renderer_of(model)
    asked = {"role": "user", "content": before + "b" * 99}
    prompt = renderer.render_ids([asked], add_generation_prompt=True)
    end = [model.chat.added[FAMILY_MODELS[name].end]] if is_ended else []
    ids = [*model.chat.encode(text), *end]
    if not ids:
        return
    bridged = model.bridged(array(IDS, prompt + ids), len(ids), [USER], None, {})
    whole = renderer.bridge_to_next_turn(prompt, ids, [USER])
    known = prompt + ids
    fits = whole is not None and whole.token_ids[: len(known)] == known
    assert bridged == (whole.token_ids[len(known) :] if fits else None)


def test_options_that_the_renderer_has_not_are_the_templates_alone(model_of: Any) -> None:
    model: ChatModel = model_of("qwen3")
    known = array(IDS, model.chat.encode("<|im_start|>assistant\na<|im_end|>"))
    assert model.bridged(known, 2, [USER], None, {"enable_thinking": False}) is not None
    assert model.bridged(known, 2, [USER], None, {"my_option": 1}) is None
    with pytest.raises(BadChat, match="my_option"):
        model.rendered([USER], None, {"my_option": 1})
    assert model.takes("enable_thinking")
    assert not model.takes("reasoning_effort")


class Left(BaseException):
    pass


class Check(Unchecked):
    def __call__(self) -> None:
        raise Left

    def aside(self, num_characters: int) -> AbstractContextManager[None]:
        raise Left


def test_work_ends_when_its_client_has_left(model_of: Any) -> None:
    body = json.dumps({"messages": [USER]}).encode()
    with pytest.raises(Left):
        make_plan(model_of("qwen3"), *read_in(body), Known(), Check())
    check_client()  # of no client
    assert make_plan(model_of("qwen3"), *read_in(body), Known()).num_prompt > 0


def test_an_effort_is_an_option_where_the_model_has_it(tmp_path: Path) -> None:
    template = "{{ reasoning_effort | default('all') }}{{ messages[0].content }}"
    with_option = load_chat_model(str(write_chat_model(tmp_path / "a", template)))
    without = load_chat_model(str(write_chat_model(tmp_path / "b", THINKING)))
    body = json.dumps({"messages": [USER], "reasoning_effort": "low"}).encode()
    ids = json.loads(make_plan(with_option, *read_in(body), Known()).body)["input_ids"]
    assert with_option.chat.decode(ids) == "low2+2?"
    assert make_plan(without, *read_in(body), Known()).num_prompt > 0


@pytest.mark.parametrize("is_streamed", [False, True])
def test_content_ends_where_the_engines_text_ends(model_of: Any, is_streamed: bool) -> None:
    """At a stop string of the client, whose ids are the answer's all the same."""
    model: ChatModel = model_of("qwen3")
    body = {"messages": [USER], "stop": [" END", "###"], "stream": is_streamed}
    plan = make_plan(model, *read_in(json.dumps(body).encode()), Known())
    ids = model.chat.encode("<think>so</think>It is 4, END of it. END")
    finish, text = FinishReason("stop", " END"), "<think>so</think>It is 4, END of it."
    reply = GenerateReply("r", text, tuple(ids), (0.0,) * len(ids), finish)
    answer, generated = read_reply(model, plan, Ended(reply))
    assert (answer.content, answer.reasoning) == ("It is 4, END of it.", "so")
    assert (generated.text, list(generated.ids)) == (text, ids)
    reading = reading_of(model, plan)
    sent = "".join(reading.feed([one]).content for one in ids)
    assert sent == "It is 4,"  # what may be a stop string is held back


@pytest.mark.parametrize("num_ids", [1, 99])
def test_a_token_that_ends_an_answer_is_no_part_of_its_content(model_of: Any, num_ids: int) -> None:
    """As it is not in the engine's text; the same token before the end is."""
    model: ChatModel = model_of("qwen3")
    (stop,) = model.chat.encode(".")
    body = {"messages": [USER], "stop_token_ids": [stop]}
    plan = make_plan(model, *read_in(json.dumps(body).encode()), Known())
    ids = model.chat.encode("It. is 4.")
    for matched, content in [(stop, "It. is 4"), (None, "It. is 4.")]:
        reading = reading_of(model, plan)
        for at in range(0, len(ids), num_ids):
            reading.feed(ids[at : at + num_ids])
        assert reading.end(matched).content == content


# -- the choice ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("qwen3", "qwen3"),
        ("qwen3_5_think", "qwen3.5"),
        ("qwen3_5_nothink", "qwen3.5"),
        ("qwen3_6", "qwen3.6"),
        ("qwen3_8", "qwen3.8"),
        ("glm4moe", "glm-4.5"),
        ("llama3_2", "llama-3"),
        ("nemotron_3_nano", "nemotron-3"),
        ("nemotron_3_ultra", "nemotron-3-ultra"),
        ("qwen2_5", None),  # no renderer writes these ids
        ("deepseekv3", None),
        ("gptoss", None),
    ],
)
def test_the_renderer_is_the_one_that_gives_the_templates_ids(
    tmp_path: Path, name: str, family: str | None
) -> None:
    folder = write_templated(tmp_path, name)
    model = load_chat_model(str(folder))
    assert (None if model.family is None else model.family.name) == family
    # A character more, and it is another template.
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "chat_template.jinja").write_text(settings["chat_template"] + "{{- '.' }}")
    assert load_chat_model(str(folder)).family is None


def test_a_setting_names_the_renderer(tmp_path: Path) -> None:
    folder = str(FAMILY_MODELS["qwen3"].write(tmp_path / "a"))
    assert load_chat_model(folder, "qwen3").family is not None
    for renderer, why in [
        ("auto", "no chat template"),
        ("default", "no chat template"),
        ("qwen4", r"set agents\.renderer to auto, default, or one of .*qwen3"),
        ("glm-4.5", "not of the renderer glm-4.5"),
    ]:
        with pytest.raises(ConfigError, match=why):
            load_chat_model(folder, renderer)
    templated = str(write_chat_model(tmp_path / "b"))
    assert load_chat_model(templated, "default").family is None
    assert new_id() != new_id()
