"""Folders of model families that ``renderers`` knows, with their special tokens and no template."""

# ruff: noqa: RUF001 - the marks of DeepSeek have such bars

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.chat_models import write_chat_model

_CHATML = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_RESPONSE = ("<tool_response>", "</tool_response>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_DEEPSEEK = (
    "begin▁of▁sentence",
    "end▁of▁sentence",
    "User",
    "Assistant",
    "tool▁calls▁begin",
    "tool▁calls▁end",
    "tool▁call▁begin",
    "tool▁call▁end",
    "tool▁sep",
    "tool▁outputs▁begin",
    "tool▁outputs▁end",
    "tool▁output▁begin",
    "tool▁output▁end",
)


@dataclass(frozen=True)
class FamilyModel:
    """A family of models.

    Attributes:
        special: its special tokens.
        end: the one that ends an answer.
        thinks: its answers may have thinking.
        next_turn: the tokens that end an answer without a call and one with calls, where they
            begin what follows.
    """

    special: tuple[str, ...]
    end: str
    thinks: bool = True
    next_turn: tuple[str, str] | None = None

    def write(self, folder: Path) -> Path:
        return write_chat_model(folder, "", special=self.special, eos=self.end)


FAMILY_MODELS = {
    "qwen3": FamilyModel((*_CHATML, *_RESPONSE), "<|im_end|>"),
    "qwen3.5": FamilyModel((*_CHATML, *_RESPONSE, *_VISION), "<|im_end|>"),
    "nemotron-3": FamilyModel((*_CHATML, *_RESPONSE), "<|im_end|>"),
    "glm-4.5": FamilyModel(
        (
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
            *_CHATML,
        ),
        "<|endoftext|>",
        next_turn=("<|user|>", "<|observation|>"),
    ),
    "deepseek-v3": FamilyModel(
        tuple(f"<｜{name}｜>" for name in _DEEPSEEK), "<｜end▁of▁sentence｜>", thinks=False
    ),
    "kimi-k2": FamilyModel(
        (
            *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        "<|im_end|>",
        thinks=False,
    ),
    "llama-3": FamilyModel(
        (
            *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            *("<|end_of_text|>", "<|eom_id|>", "<|python_tag|>"),
        ),
        "<|eot_id|>",
        thinks=False,
    ),
    "minimax-m2": FamilyModel(
        (
            *("]~!b[", "]~b]", "[e~[", "<minimax:tool_call>", "</minimax:tool_call>"),
            *("<think>", "</think>"),
        ),
        "[e~[",
    ),
}
