"""A shop with two tools, and a warmed-up policy that seldom calls the right one.

A question is for a price or a stock of one of six items.  The tool gives a number, and the right
answer repeats it.  The warm-up is supervised, on demonstrations of this form: in the first ones
each call is the right one, in the last ones four calls in five are for anything.  So the policy
starts with about one right answer in nine, and with all that it needs to learn the others from
rewards.  Nothing is downloaded.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

FACTS = ("price", "stock")
ITEMS = ("apples", "figs", "limes", "nuts", "pears", "plums")
TASKS = [(fact, item) for fact in FACTS for item in ITEMS]
PARAMETERS = {"type": "object", "properties": {"item": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in FACTS
]
MARKS = [f"<{end}{name}>" for name in ("tools", "tool_call", "tool_response") for end in ("", "/")]
# The form of Qwen and Hermes; a model of those families brings its own template.
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
  {%- if message.role == 'tool' %}
    {{- '<|im_start|>user\n<tool_response>\n' + message.content }}
    {{- '\n</tool_response><|im_end|>\n' }}
  {%- else %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
      {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
      {{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def question(fact: str, item: str) -> dict[str, Any]:
    return {"role": "user", "content": f"What is the {fact} of {item}?"}


class Shop:
    """The tools.  Each episode has a shop with other numbers, so no number can be learned."""

    def __init__(self, rng: random.Random) -> None:
        self.facts = {task: rng.randrange(10, 100) for task in TASKS}
        self.calls: list[Any] = []

    def call(self, tool: str, arguments: str) -> str:
        """What a tool returns, also for a call that makes no sense: the model reads it."""
        try:
            self.calls.append((tool, json.loads(arguments)["item"]))
            return str(self.facts[self.calls[-1]])
        except (KeyError, TypeError, ValueError) as error:
            return f"error: {type(error).__name__}"

    def reward(self, task: tuple[str, str], answer: str) -> float:
        """A quarter for the right tool, a quarter for its right item, the rest for the answer."""
        if len(self.calls) != 1:
            return 0.0
        right = [one == other for one, other in zip(self.calls[0], task, strict=True)]
        is_right = all(right) and re.findall(r"\d+", answer) == [str(self.facts[task])]
        return 0.25 * sum(right) + 0.5 * float(is_right)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Bytes, merged as in ``texts``; a digit is a token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=448, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not special: engines leave special tokens out of the text, where the calls are read.
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=TEMPLATE,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
    )


def demonstration(rng: random.Random, right_share: float) -> list[dict[str, Any]]:
    """A conversation of the right form, whose call is seldom what its question needs."""
    task, result = rng.choice(TASKS), str(rng.randrange(10, 100))
    tool, item = task if rng.random() < right_share else rng.choice(TASKS)
    call = {"type": "function", "function": {"name": tool, "arguments": {"item": item}}}
    return [
        question(*task),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": f"It is {result}."},
    ]


def tokens_of(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Any = TOOLS
) -> tuple[list[int], list[int]]:
    """The ids of a demonstration, and a mask: 1 for those of its answers."""
    render = partial(tokenizer.apply_chat_template, tools=tools, tokenize=False)
    ids: list[int] = []
    mask: list[int] = []
    end = 0
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = render(messages[:number], add_generation_prompt=True)
            after = render(messages[: number + 1]).removesuffix("\n")  # it is not generated
            for text, is_answer in ((before[end:], 0), (after[len(before) :], 1)):
                new = tokenizer.encode(text, add_special_tokens=False)
                ids, mask = ids + new, mask + [is_answer] * len(new)
            end = len(after)
    return ids, mask


def make_warmed_up_model(folder: Path, seed: int, tools: Any = TOOLS) -> None:
    """Write a tiny model of Qwen3's shape, and warm it up as the text above says.

    Args:
        tools: as an agent sends them; each has one argument, ``item``.
    """
    rng = random.Random(seed)
    right, random_ones = ([demonstration(rng, share) for _ in range(2000)] for share in (1.0, 0.2))
    tokenizer = make_tokenizer([json.dumps(one) for one in [tools, *right]])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.06,  # layers this narrow learn several times slower with the default
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    for shown, num_steps, rate in ((right, 200, 3e-3), (random_ones, 60, 1e-3)):
        data = [tokens_of(tokenizer, one, tools) for one in shown]
        warm_up(model, data, num_steps, rate)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def warm_up(
    model: torch.nn.Module, data: list[tuple[list[int], list[int]]], num_steps: int, rate: float
) -> None:
    """Cross-entropy on the answers of demonstrations, 16 in a step."""
    ids, mask = (
        pad_sequence([torch.tensor(one) for one in part], True) for part in zip(*data, strict=True)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for rows in torch.randint(len(data), (num_steps, 16)):
        is_answer = mask[rows, 1:]
        optimizer.zero_grad()
        (-(token_logprobs(model, ids[rows]) * is_answer).sum() / is_answer.sum()).backward()
        optimizer.step()


def token_logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probs of ``ids[:, 1:]``; padding is on the right, where causal attention is blind."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    logprobs: torch.Tensor = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return logprobs
