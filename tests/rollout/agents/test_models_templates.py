"""The chat templates of real models, of which TRL has copies: calls, and what is behind them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollout.agents.model.alignment import continuation, tokenised
from rollout.agents.model.answer_reader import Opening
from rollout.agents.model.families import load_chat_model
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
    model = load_chat_model(str(write_chat_model(tmp_path, text)), "default")
    assert model.form.name == form
    bound = model.bound(TOOLS, {})
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
    begin = '{"name": "add"' if form == "llama3_json" else next(iter(model.form.blocks))
    reading = model.reader.reading(tools=TOOLS, new_id=lambda: "0123456789")
    reading.feed(model.chat.encode(written[written.rindex(begin) :]))
    answer = reading.end()
    (call,) = answer.calls
    assert json.loads(call["function"]["arguments"]) == ARGUMENTS
    assert answer.content == ""
    ids = continuation(bound, messages, 2, None, "MARK", model.ends)
    assert ids == tokenised(bound, behind)[0]


def test_the_turns_of_gpt_oss_follow_its_template(tmp_path: Path) -> None:
    """An answer ends with another token than the template writes for it in a history."""
    text = (TEMPLATES / "gptoss.jinja").read_text()
    special = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|message|>")
    folder = write_chat_model(tmp_path, text, special=special, eos="<|return|>")
    model = load_chat_model(str(folder), "gpt-oss")
    assert (model.form.name, model.family) == ("harmony", None)
    assert model.stop_ids == model.chat.encode("<|return|><|call|>")
    described = [{"type": "function", "function": {**TOOLS[0]["function"], "description": "d"}}]
    bound = model.bound(described, {})
    user: dict[str, object] = {"role": "user", "content": "q"}
    asked = bound.render([user], for_answer=True)
    assert asked.endswith("<|start|>user<|message|>q<|end|><|start|>assistant")
    call = (
        "<|channel|>analysis<|message|>A sum.<|end|><|start|>assistant to=functions.add"
        f"<|channel|>commentary json<|message|>{json.dumps(ARGUMENTS)}<|call|>"
    )
    final = "<|channel|>final<|message|>It is 4.<|return|>"
    for answer, new, behind in [
        (
            call,
            {"role": "tool", "content": "sum=4", "tool_call_id": "call_0123456789"},
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"sum=4"<|end|>',
        ),
        (final, user, "<|start|>user<|message|>q<|end|>"),
    ]:
        reading = model.reader.reading(
            tools=TOOLS,
            opening=Opening(ids=model.chat.encode(asked[-40:])),
            new_id=lambda: "0123456789",
        )
        reading.feed(model.chat.encode(answer))
        message = reading.end().message()
        assert message.get("reasoning_content", "") == ("A sum." if answer is call else "")
        assert bool(message["content"]) == (answer is final)
        messages = model.as_rendered(read_messages([user, message, new]))
        assert messages[2].get("name") == ("add" if answer is call else None)
        (end,) = model.chat.encode(answer[answer.rindex("<") :])
        ids = continuation(bound, messages, 2, end, "MARK", model.ends)
        assert ids == model.chat.encode(behind + "<|start|>assistant")
        cut_off = continuation(bound, messages, 2, None, "MARK", model.ends)
        assert cut_off == model.chat.encode("<|end|>") + ids
