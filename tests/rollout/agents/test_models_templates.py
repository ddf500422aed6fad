"""The chat templates of real models, of which TRL has copies: calls, and what is behind them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout.agents.model.alignment import continuation, tokenised
from rollout.agents.model.chat_tokenizer import load_chat_tokenizer
from rollout.agents.model.tool_forms import schemas_of
from rollout.agents.wire.messages import read_messages
from tests.support.chat_models import write_chat_model
from tests.support.tool_families import ARGUMENTS, FAMILIES, TOOLS

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

trl = find_spec("trl")  # it is not imported, which would load torch
if trl is None or trl.origin is None:
    pytest.skip("TRL is not installed", allow_module_level=True)
TEMPLATES = Path(trl.origin).parent / "chat_templates"

LLAMA_BEHIND = (
    '<|eot_id|><|start_header_id|>ipython<|end_header_id|>\n\n"sum=4"<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
QWEN_BEHIND = (
    "<|im_end|>\n<|im_start|>user\n<tool_response>\nsum=4\n</tool_response>{}<|im_end|>\n"
    "<|im_start|>assistant\n{}"
)
DEEPSEEK_BEHIND = "".join(
    f"<\uff5c{mark}\uff5c>{text}"
    for mark, text in (
        ("end\u2581of\u2581sentence", ""),
        ("tool\u2581outputs\u2581begin", ""),
        ("tool\u2581output\u2581begin", "sum=4"),
        ("tool\u2581output\u2581end", ""),
        ("tool\u2581outputs\u2581end", ""),
    )
)


@pytest.mark.parametrize(
    ("name", "form", "behind"),
    [
        ("deepseekv3", "deepseek_v3", DEEPSEEK_BEHIND),
        ("glm4moe", "glm45", "<|observation|>" + FAMILIES["glm"].behind),
        ("llama3_1", "llama3_json", LLAMA_BEHIND),
        ("llama3_2", "llama3_json", LLAMA_BEHIND),
        ("nemotron_3_nano", "qwen3_coder", QWEN_BEHIND.format("\n", "<think>\n")),
        ("qwen2_5", "hermes", QWEN_BEHIND.format("", "")),
        ("qwen3", "hermes", QWEN_BEHIND.format("", "")),
        ("qwen3_5_think", "qwen3_coder", QWEN_BEHIND.format("", "<think>\n")),
    ],
)
def test_a_call_is_read_as_its_template_writes_it_and_the_result_follows(
    tmp_path: Path, name: str, form: str, behind: str
) -> None:
    text = (TEMPLATES / f"{name}.jinja").read_text()
    chat = load_chat_tokenizer(str(write_chat_model(tmp_path, text)))
    assert chat.reader.form.name == form
    bound = chat.bound(TOOLS, {})
    function = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
    messages = read_messages(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": function, "type": "f"}]},
            {"role": "tool", "tool_call_id": "c", "content": "sum=4"},
        ]
    )
    closing = behind[: behind.index(">") + 1]
    written = bound.render(messages[:2], for_answer=False).rstrip().removesuffix(closing)
    begin = '{"name": "add"' if form == "llama3_json" else chat.reader.form.begins[0]
    answer = chat.reader.read(
        written[written.rindex(begin) :], schemas_of(TOOLS), lambda: "0123456789"
    )
    (call,) = answer.calls
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert answer.content == ""
    ids = continuation(bound, messages, 2, None, "MARK")
    assert ids == tokenised(bound, behind)[0]
