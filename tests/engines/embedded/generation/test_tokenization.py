"""Texts and ids are those of transformers' own tokenizer of the same folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from engines.embedded.core.errors import Invalid
from engines.embedded.generation import sampling_params
from engines.embedded.generation.tokenization import TextCodec, load_text
from hypothesis import given
from hypothesis import strategies as st
from tests.support.chat_models import THINKING, TOOLS, write_chat_model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

# A variable that is set in the block is not seen behind it, and one of before is seen in it.
BLOCKS = (
    "{% set x = 1 %}{% for message in messages %}{%- generation %}{% set x = 2 %}{{ x }}"
    "{{ message.content | tojson }}{%- endgeneration %}{{ x }}{% endfor %}"
    "{{ eos_token }}{{ bos_token }}{{ tools is none }}{{ documents is none }}{{ flag }}"
)
LOOPS = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}"
TEMPLATES = {"thinking": THINKING, "blocks": BLOCKS, "loops": LOOPS + "{% endfor %}"}
trl = find_spec("trl")  # it has copies of real models' templates, and is not imported
if trl is not None and trl.origin is not None:
    files = Path(trl.origin).parent.glob("chat_templates/*.jinja")
    TEMPLATES |= {file.stem: file.read_text() for file in files}
CALL = {"type": "function", "id": "c12345678", "function": {"name": "add", "arguments": {"x": 1}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "<b>é\n"}],
    "turns": [
        {"role": "system", "content": " s "},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>t</think>\n\na"},
        {"role": "user", "content": "x"},
    ],
    "calls": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "add", "content": "4", "tool_call_id": "c12345678"},
    ],
}


def theirs_of(folder: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def ours_of(folder: Path) -> TextCodec:
    return load_text(folder, frozenset(), 300)


def params(*, skip: bool) -> sampling_params.Params:
    return sampling_params.parse({"skip_special_tokens": skip})


def result_of(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """None where the template refuses."""
    try:
        return call(*args, **kwargs)
    except Exception:  # theirs is whatever the template raises
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_have_the_ids_that_transformers_gives_them(tmp_path: Path, name: str) -> None:
    folder = write_chat_model(tmp_path)
    tokens = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>"}
    settings = {"chat_template": TEMPLATES[name], **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = ours_of(folder), theirs_of(folder)
    results = []
    for chat in CHATS.values():
        for tools in (None, TOOLS):
            options = {"tools": tools, "flag": True}
            form = {"tokenize": False, "add_generation_prompt": True}
            text = result_of(theirs.apply_chat_template, chat, **form, **options)
            wanted = None if text is None else theirs.encode(text, add_special_tokens=False)
            results.append(result_of(ours.apply_chat_template, chat, options))
            assert results[-1] == wanted
    assert any(results)


@pytest.mark.parametrize("in_files", [False, True])
def test_a_template_of_its_own_name_is_for_requests_with_tools(
    tmp_path: Path, in_files: bool
) -> None:
    folder = write_chat_model(tmp_path)
    texts = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    if in_files:
        (folder / "chat_template.jinja").write_text(texts["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    else:
        templates = [{"name": name, "template": text} for name, text in texts.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    ours, theirs = ours_of(folder), theirs_of(folder)
    for tools, text in ((None, "plain"), (TOOLS, "1 tools")):
        options = {"tools": tools}
        assert ours.apply_chat_template(CHATS["one"], options) == ours.encode(text)
        assert theirs.apply_chat_template(CHATS["one"], tokenize=False, **options) == text


def test_a_chat_that_cannot_be_rendered_is_refused(tmp_path: Path) -> None:
    none = ours_of(write_chat_model(tmp_path / "none", ""))
    with pytest.raises(Invalid, match="no chat template; use /v1/completions"):
        none.apply_chat_template(CHATS["one"], {})
    refuses = ours_of(write_chat_model(tmp_path / "refuses", "{{ raise_exception('no roles') }}"))
    with pytest.raises(Invalid, match="refused the messages: no roles"):
        refuses.apply_chat_template(CHATS["one"], {})
    with pytest.raises(Invalid, match="must not have messages"):
        refuses.apply_chat_template(CHATS["one"], {"messages": []})
    escapes = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(Invalid, match="unsafe"):
        ours_of(write_chat_model(tmp_path / "x", escapes)).apply_chat_template(CHATS["one"], {})


SETTINGS: dict[str, dict[str, Any]] = {
    "named": {"eos_token": "<|im_end|>", "pad_token": "<pad>", "bos_token": None},
    "extra": {"eos_token": "<end>", "extra_special_tokens": ["<a>", "<|im_start|>"]},
    "named_extra": {"eos_token": "<end>", "extra_special_tokens": {"image_token": "<image>"}},
    "older": {
        "eos_token": {"__type": "AddedToken", "content": "<end>", "special": True},
        "additional_special_tokens": ["<a>"],
    },
    "decoder": {
        "eos_token": "<end>",
        "added_tokens_decoder": {
            "260": {"content": "<word>", "normalized": True, "special": False},
            "259": {"content": "<end>", "normalized": False, "special": True, "lstrip": True},
        },
    },
}


@pytest.mark.parametrize("name", [*SETTINGS, "map"])
def test_tokens_that_the_settings_add_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = write_chat_model(tmp_path)
    if name == "map":
        pair = {"eos_token": {"content": "<end>", "lstrip": False}, "pad_token": "<pad>"}
        (folder / "special_tokens_map.json").write_text(json.dumps(pair))
    else:
        (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS[name]))
    ours = ours_of(folder)
    if name == "extra" and metadata.version("transformers").startswith("4."):
        text = json.dumps(SETTINGS[name]).replace("extra_", "additional_")  # its name there
        (folder / "tokenizer_config.json").write_text(text)
    theirs = theirs_of(folder)
    text = "a <end> <a><word> <pad><image>b<|im_end|> c"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    for skip in (False, True):
        assert ours.decode(ids, params(skip=skip)) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_ids == {theirs.eos_token_id}


def llama_2(folder: Path) -> Path:
    """A tokenizer of the form that Llama 2's has: bytes as tokens, a mark for each space, a
    beginning; and it cuts and pads."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["\u2581", "a", "b", ".", "'", "\u2581a", "ab"]
    vocabulary = {word: index for index, word in enumerate(words)}
    merges = [("\u2581", "a"), ("a", "b")]
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    joined = (decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse())
    tokenizer.decoder = decoders.Sequence([*joined, decoders.Strip(" ", 1, 0)])
    names = ("<unk>", "<s>", "</s>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "</s>", "bos_token": "<s>", "clean_up_tokenization_spaces": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module", params=["bytes", "llama_2"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    llama_2(folder) if request.param == "llama_2" else write_chat_model(folder)
    return ours_of(folder), theirs_of(folder)


@given(text=st.text(alphabet="ab '.é\U0001f600<s>|\n"), skip=st.booleans(), data=st.data())
def test_texts_and_ids_are_those_of_transformers(
    pair: Any, text: str, skip: bool, data: st.DataObject
) -> None:
    ours, theirs = pair
    for special in (False, True):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
    ids = data.draw(st.lists(st.integers(0, 265), max_size=12))
    wanted = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert ours.decode(ids, params(skip=skip)) == wanted
    assert all(ours.token(token) == theirs.decode([token]) for token in ids)


def test_the_end_of_the_tokenizer_joins_those_of_the_model(tmp_path: Path) -> None:
    folder = write_chat_model(tmp_path)
    assert load_text(folder, frozenset({7}), 300).eos_ids == {7, 256}
    (folder / "tokenizer_config.json").write_text("{}")
    assert load_text(folder, frozenset({7}), 300).eos_ids == {7}


def test_a_folder_without_a_tokenizer_that_can_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\n")  # of SentencePiece
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*AutoTokenizer writes one"):
        ours_of(tmp_path)
    folder = write_chat_model(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"a": 1}}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        ours_of(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        ours_of(folder)
