"""Templates render as transformers renders them, and continuations are exact."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agents.model.alignment import continuation, first_difference, tokenised
from rollout.agents.model.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from rollout.agents.model.families import load_chat_model
from rollout.agents.wire.messages import BadChat, read_messages
from rollout.core.errors import ConfigError
from tests.support.chat_models import END, THINKING, write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

BLOCKS = (
    "{% set x = 1 %}"
    "{% for message in messages %}{% if message.role == 'x' %}{% continue %}{% endif %}"
    "{%- generation %}{% set x = 2 %}{{ message.content | tojson }}{%- endgeneration %}{{ x }}"
    "{% endfor %}{{ eos_token }}{{ tools }}{{ documents is none }}{{ flag }}"
)
TOOLS = [{"type": "function", "function": {"name": "é"}}]
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "<b>é"},
    {"role": "assistant", "content": "<think>t</think>\n\na"},
    {"role": "user", "content": "x"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> ChatTokenizer:
    return load_chat_tokenizer(str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("template", [THINKING, BLOCKS])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_gives_the_text_and_the_ids_that_transformers_gives(
    tmp_path: Path, template: str, tools: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    model = write_chat_model(tmp_path, template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(model))
    bound = load_chat_tokenizer(str(model)).bound(tools, {"flag": True})
    for for_answer in (False, True):
        options = {"tools": tools, "flag": True, "add_generation_prompt": for_answer}
        text = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
        assert bound.render(MESSAGES, for_answer=for_answer) == text
        assert tokenised(bound, text)[0] == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("is_text", [False, True])
def test_a_template_gets_the_arguments_of_calls_as_it_takes_them(
    tmp_path: Path, is_text: bool
) -> None:
    """As objects, or as their JSON where the template adds them to a text."""
    written = "call.function.arguments" + ("" if is_text else " | tojson")
    template = (
        "{% for message in messages %}{{ message.content }}"
        "{% for call in message.tool_calls or [] %}{{ 'f:' + "
        + written
        + " }}{% endfor %}{% endfor %}"
    )
    function = {"name": "f", "arguments": '{"x": "é"}'}
    calls = [{"id": "1", "type": "function", "function": function}]
    raw = [
        {"role": "user", "content": "q "},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": " r"},
    ]
    bound = load_chat_tokenizer(str(write_chat_model(tmp_path, template))).bound(None, {})
    assert bound.render(read_messages(raw), for_answer=True) == 'q f:{"x": "é"} r'


def test_the_template_for_tools_shows_the_form_of_calls(tmp_path: Path) -> None:
    templates = {"default": THINKING, "tool_use": "[TOOL_CALLS]{{ messages }}"}
    model = write_chat_model(tmp_path)
    named = [{"name": name, "template": text} for name, text in templates.items()]
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_chat_model(str(model)).form.name == "mistral"
    assert load_chat_model(str(model), tool_call_parser="hermes").form.name == "hermes"


WORDS = st.text(alphabet="ab <>/|", max_size=12)


@given(st.lists(st.tuples(WORDS, WORDS, st.booleans()), min_size=1, max_size=4), WORDS)
def test_a_continuation_is_what_the_template_writes_behind_the_answer(
    loaded: ChatTokenizer, turns: list[tuple[str, str, bool]], last: str
) -> None:
    """Without thinking this template keeps its history, so that a new tokenisation is the same."""
    template = loaded.bound(None, {})
    messages: list[dict[str, Any]] = []
    ids: list[int] = []
    end: int | None = None
    for word, answer, is_cut in turns:
        messages.append({"role": "user", "content": word})
        ids += behind(template, messages, end)
        assert first_difference(ids, anew(template, messages)) is None
        ids += [*tokenised(template, answer)[0], *([] if is_cut else [END])]
        messages.append({"role": "assistant", "content": answer})
        end = None if is_cut else END
    messages.append({"role": "user", "content": last})
    ids += behind(template, messages, end)
    assert ids == anew(template, messages)


def behind(template: Any, messages: list[Any], end: int | None) -> list[int]:
    if len(messages) == 1:
        return anew(template, messages)
    new = continuation(template, messages, len(messages) - 1, end, "4f1c9a")
    assert new is not None
    return new


def anew(template: Any, messages: list[Any]) -> list[int]:
    return tokenised(template, template.render(messages, for_answer=True))[0]


def test_a_template_that_writes_no_answers_gives_no_continuation(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path, "{{ messages | length }}")
    template = load_chat_tokenizer(str(model)).bound(None, {})
    assert continuation(template, MESSAGES, 3, None, "mark") is None


CALLS_ALONE = (
    "{% for message in messages %}{% if message.tool_calls %}{calls}"
    "{% else %}{{ message.content }}{% endif %};{% endfor %}"
)
ORDERED = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}"
    "{{ raise_exception('a result without a call') }}{% endif %}"
    "{{ message.content }}{{ message.tool_calls | length if message.tool_calls }};{% endfor %}"
)


@pytest.mark.parametrize("template", [CALLS_ALONE, ORDERED])
def test_a_result_follows_a_call_whatever_the_template_wants(tmp_path: Path, template: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = read_messages(
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "a", "tool_calls": [call]},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ]
    )
    bound = load_chat_tokenizer(str(write_chat_model(tmp_path, template))).bound(None, {})
    assert continuation(bound, messages, 2, None, "4f1c9a") == tokenised(bound, ";r;")[0]


def test_the_first_difference_is_the_first_token_that_differs() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1]) == 1


def test_templates_by_name_and_in_a_file_of_their_own_are_found(tmp_path: Path) -> None:
    write_chat_model(tmp_path)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    config = {"chat_template": named, "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_chat_tokenizer(str(tmp_path))
    assert loaded.bound(None, {}).render([], for_answer=True) == "plain"
    assert loaded.bound(TOOLS, {}).render([], for_answer=True) == "tools"
    (tmp_path / "chat_template.jinja").write_text("of a file{{ eos_token }}")
    loaded = load_chat_tokenizer(str(tmp_path))
    assert loaded.bound(None, {}).render([], for_answer=True) == "of a file<|im_end|>"


def test_a_template_that_refuses_is_the_clients_error(tmp_path: Path) -> None:
    model = write_chat_model(tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadChat, match="roles must alternate"):
        load_chat_tokenizer(str(model)).bound(None, {}).render([], for_answer=True)


@pytest.mark.parametrize("template", ["", "{% if %}"])
def test_a_folder_without_a_usable_template_names_the_setting(
    tmp_path: Path, template: str
) -> None:
    with pytest.raises(ConfigError, match=r"set router\.tokenizer_path"):
        load_chat_model(str(write_chat_model(tmp_path, template)))


def test_a_broken_file_and_a_missing_package_say_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_chat_model(tmp_path)
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cannot be read.*set router\.tokenizer_path"):
        load_chat_tokenizer(str(model))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install .*'jinja2>=3.1'"):
        load_chat_tokenizer(str(model))


def test_a_tokenizer_that_cuts_and_pads_does_neither_here(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    file = str(write_chat_model(tmp_path) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    tokenizer.save(file)
    bound = load_chat_tokenizer(str(tmp_path)).bound(None, {})
    assert [len(tokenised(bound, text)[0]) for text in ("ab", "abcdefgh")] == [2, 8]


def test_content_in_parts_and_arguments_as_json_reach_the_template_as_it_expects_them() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = read_messages(
        [
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
            {"role": "tool", "content": "r", "tool_call_id": "c"},
        ]
    )
    assert [message["content"] for message in messages] == ["ab", "", "r"]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert "refusal" not in messages[1]
