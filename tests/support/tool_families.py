"""Small chat templates of families that write tool calls in different forms, and their answers.

Each template is like the family's own in what matters to a session: the marks and their order, how
arguments and results are written, what is refused, and the token that ends an answer.
"""

# ruff: noqa: RUF001 - the marks of DeepSeek have such bars

from __future__ import annotations

from dataclasses import dataclass

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "unit": {"type": "string"},
                    "more": {"type": "object"},
                },
            },
        },
    }
]
ARGUMENTS = {"a": 2, "unit": "7", "more": {"é": [1, "}"]}}
_JSON = '{"a": 2, "unit": "7", "more": {"é": [1, "}"]}}'
RESULT = "sum=4"


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        form: of its calls.
        call: an answer's text that calls ``add`` with ``ARGUMENTS``.
        behind: what a prompt has behind this answer and its end; ``{id}`` is the call's id.
        end: the token that ends this answer.
        others: the one that ends any other answer; empty for the same.
        special: tokens that are left out of an engine's text.
        drift: of the turn behind the call.
        content: of the message beside the call.
    """

    form: str
    template: str
    call: str
    behind: str
    end: str
    others: str = ""
    special: tuple[str, ...] = ()
    drift: str = "clean"
    content: str | None = None


_MISTRAL_TOOLS = """
{%- if message.role == 'user' %}
  {%- if tools %}{{ '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
  {{- '[INST] ' + message.content + '[/INST]' }}
"""
# Calls without content, in one list, with ids of nine characters.
MISTRAL_LIST = (
    "{%- for message in messages %}"
    + _MISTRAL_TOOLS
    + """
{%- elif message.tool_calls is defined %}
  {{- '[TOOL_CALLS] [' }}
  {%- for call in message.tool_calls %}
    {%- if call.id | length != 9 %}{{ raise_exception('ids must have 9 characters') }}{% endif %}
    {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
    {{- ', ' if not loop.last else ']' + eos_token }}
  {%- endfor %}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}
  {%- if message.tool_call_id | length != 9 %}
    {{- raise_exception('ids must have 9 characters') }}
  {%- endif %}
  {{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' }}
  {{- message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}
"""
)
MISTRAL_ARGS = (
    "{%- for message in messages %}"
    + _MISTRAL_TOOLS
    + """
{%- elif message.role == 'assistant' %}{{ message.content }}
  {%- for call in message.tool_calls or [] %}
    {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
  {%- endfor %}{{ eos_token }}
{%- else %}{{ '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}
"""
)
# One call, without content; content is trimmed.
LLAMA = """
{%- if tools %}
  {{- 'Respond in the format {"name": function name, "parameters": dictionary of them}.' }}
{%- endif %}
{%- for message in messages %}
  {%- if 'tool_calls' in message %}
    {%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at once') }}{% endif %}
    {%- set function = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + function.name }}
    {{- '", "parameters": ' + (function.arguments | tojson) + '}<|eot_id|>' }}
  {%- elif message.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
    {{- ({'output': message.content} | tojson) + '<|eot_id|>' }}
  {%- else %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {{- (message.content | trim) + '<|eot_id|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
QWEN3_CODER = """
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
    {{- '\n</tool_response>\n<|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role }}
    {%- if message.content | trim %}{{ '\n' + (message.content | trim) }}{% endif %}
    {%- if message.tool_calls %}
      {%- if message.content | trim %}{{ '\n' }}{% endif %}
      {%- for call in message.tool_calls %}
        {{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
        {%- for name, value in call.function.arguments | items %}
          {{- '<parameter=' + name + '>\n' }}
          {{- value | tojson if value is mapping else value | string }}
          {{- '\n</parameter>\n' }}
        {%- endfor %}{{ '</function>\n</tool_call>' }}
      {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""
# The token that ends an answer begins the next message.
GLM = """
{%- if tools %}{{ '<|system|>\n' + (tools | tojson) }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|observation|>\n<tool_response>\n' + message.content + '\n</tool_response>' }}
  {%- elif message.role == 'assistant' %}
    {{- '<|assistant|>\n<think></think>' }}
    {%- if message.content %}{{ '\n' + message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
      {{- '\n<tool_call>' + call.function.name + '\n' }}
      {%- for name, value in call.function.arguments.items() %}
        {{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
        {{- value if value is string else value | tojson }}
        {{- '</arg_value>\n' }}
      {%- endfor %}{{ '</tool_call>' }}
    {%- endfor %}
  {%- else %}{{ '<|' + message.role + '|>\n' + message.content }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}
"""
# Arguments are a text, and a result is followed by the answer at once.
DEEPSEEK = """
{%- set ns = namespace(waits=false) %}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
  {%- if message.role == 'user' %}{% set ns.waits = true %}
    {{- '<｜User｜>' + message.content }}
  {%- elif message.role == 'tool' %}
    {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
  {%- else %}
    {%- if ns.waits %}{{ '<｜Assistant｜>' }}{% set ns.waits = false %}{% endif %}
    {{- message.content }}
    {%- if message.tool_calls %}{{ '<｜tool▁calls▁begin｜>' }}
      {%- for call in message.tool_calls %}
        {{- CALL }}
      {%- endfor %}{{ '<｜tool▁calls▁end｜>' }}
    {%- endif %}
    {{- '<｜end▁of▁sentence｜>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and ns.waits %}{{ '<｜Assistant｜>' }}{% endif %}
"""
DEEPSEEK_V3 = DEEPSEEK.replace(
    "CALL",
    "'<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n'"
    " + call.function.arguments + '\\n```<｜tool▁call▁end｜>'",
)
DEEPSEEK_V31 = DEEPSEEK.replace(
    "CALL",
    "'<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>'"
    " + call.function.arguments + '<｜tool▁call▁end｜>'",
)
# A result names the call's id, which the model has written.
KIMI = """
{%- if tools %}
  {{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|im_system|>tool<|im_middle|>## Return of ' + message.tool_call_id }}
    {{- '\n' + message.content }}
  {%- else %}
    {{- '<|im_' + message.role + '|>' + message.role + '<|im_middle|>' + message.content }}
    {%- if message.tool_calls %}{{ '<|tool_calls_section_begin|>' }}
      {%- for call in message.tool_calls %}
        {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
        {{- call.function.arguments | tojson }}{{ '<|tool_call_end|>' }}
      {%- endfor %}{{ '<|tool_calls_section_end|>' }}
    {%- endif %}
  {%- endif %}
  {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""

_MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "[TOOL_RESULTS]")
_LLAMA_TOKENS = ("<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>")
_LLAMA_BEHIND = (
    '<|start_header_id|>ipython<|end_header_id|>\n\n{"output": "sum=4"}<|eot_id|>'
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_DEEPSEEK_TOKENS = tuple(
    f"<｜tool▁{one}｜>" for one in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
)

FAMILIES = {
    "mistral_list": Family(
        form="mistral",
        template=MISTRAL_LIST,
        special=_MISTRAL_TOKENS,
        call=f'[TOOL_CALLS] [{{"name": "add", "arguments": {_JSON}}}]',
        behind='[TOOL_RESULTS] {"content": sum=4, "call_id": "{id}"}[/TOOL_RESULTS]',
        end="</s>",
        drift="realigned",  # the template writes the id
    ),
    "mistral_args": Family(
        form="mistral",
        template=MISTRAL_ARGS,
        special=_MISTRAL_TOKENS,
        call=f"I add.[TOOL_CALLS]add[ARGS]{_JSON}",
        content="I add.",
        behind="[TOOL_RESULTS]sum=4[/TOOL_RESULTS]",
        end="</s>",
    ),
    "llama_bare": Family(
        form="llama3_json",
        template=LLAMA,
        special=_LLAMA_TOKENS,
        call=f'{{"name": "add", "parameters": {_JSON}}}',
        behind=_LLAMA_BEHIND,
        end="<|eot_id|>",
    ),
    "llama_tag": Family(
        form="llama3_json",
        template=LLAMA,
        special=_LLAMA_TOKENS,
        call=f'<|python_tag|>{{"name": "add", "parameters": {_JSON}}}',
        behind=_LLAMA_BEHIND,
        end="<|eot_id|>",
        drift="realigned",  # the template writes no tag
    ),
    "qwen3_coder": Family(
        form="qwen3_coder",
        template=QWEN3_CODER,
        call=(
            "I add.\n\n<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n"
            '<parameter=unit>\n7\n</parameter>\n<parameter=more>\n{"é": [1, "}"]}\n</parameter>\n'
            "</function>\n</tool_call>"
        ),
        content="I add.",
        behind=(
            "\n<|im_start|>user\n<tool_response>\nsum=4\n</tool_response>\n<|im_end|>\n"
            "<|im_start|>assistant\n"
        ),
        end="<|im_end|>",
    ),
    "glm": Family(
        form="glm45",
        template=GLM,
        call=(
            "\n<think></think>\nI add.\n<tool_call>add\n<arg_key>a</arg_key>\n"
            "<arg_value>2</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>7</arg_value>\n"
            '<arg_key>more</arg_key>\n<arg_value>{"é": [1, "}"]}</arg_value>\n</tool_call>'
        ),
        content="I add.",
        behind="\n<tool_response>\nsum=4\n</tool_response><|assistant|>",
        end="<|observation|>",
        others="<|user|>",
    ),
    "deepseek_v3": Family(
        form="deepseek_v3",
        template=DEEPSEEK_V3,
        call=(
            "I add.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n"
            f"```json\n{_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        content="I add.",
        behind="<｜tool▁output▁begin｜>sum=4<｜tool▁output▁end｜>",
        end="<｜end▁of▁sentence｜>",
    ),
    "deepseek_v31": Family(
        form="deepseek_v31",
        template=DEEPSEEK_V31,
        special=_DEEPSEEK_TOKENS,
        call=(
            "I add.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            f"{_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
        ),
        content="I add.",
        behind="<｜tool▁output▁begin｜>sum=4<｜tool▁output▁end｜>",
        end="<｜end▁of▁sentence｜>",
    ),
    "kimi": Family(
        form="kimi_k2",
        template=KIMI,
        special=(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|im_middle|>",
        ),
        call=(
            "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            f"<|tool_call_argument_begin|>{_JSON}<|tool_call_end|><|tool_calls_section_end|>"
        ),
        content="I add.",
        behind=(
            "<|im_system|>tool<|im_middle|>## Return of functions.add:0\nsum=4<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>"
        ),
        end="<|im_end|>",
    ),
}
