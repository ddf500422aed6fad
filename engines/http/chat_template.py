"""Tokens and chat templates that a model's folder names, read and rendered as transformers does.

Without transformers, whose import takes seconds and loads torch.  jinja2 is imported by the first
template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.plain_json import object_in

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer


def read_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a ``tokenizer.json``; it neither cuts texts nor fills them up.

    Raises:
        ValueError: it cannot be read.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no narrower one
        raise ValueError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """What is in ``tokenizer_config.json``; where that lists no added tokens, as in older models,
    with the tokens of ``special_tokens_map.json``.

    Raises:
        OSError, ValueError: a file cannot be read.
    """
    settings = object_or_empty(folder / "tokenizer_config.json")
    if "added_tokens_decoder" in settings:
        return settings
    return settings | object_or_empty(folder / "special_tokens_map.json")


def object_or_empty(file: Path) -> dict[str, Any]:
    """The JSON object in a file, or empty if there is no file."""
    return object_in(file) if file.is_file() else {}


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """What templates know as ``bos_token``, ``eos_token`` and so on."""
    tokens = {}
    for name, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def template_texts(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Template texts by name, ``default`` first; files of their own replace what the settings
    have."""
    files = [folder / "chat_template.jinja", *folder.glob("additional_chat_templates/*.jinja")]
    texts = {file.stem: file.read_text(encoding="utf-8") for file in files if file.is_file()}
    if texts:
        return {"default": texts.pop("chat_template", ""), **texts}
    templates = settings.get("chat_template") or {}
    if isinstance(templates, str):
        return {"default": templates}
    if isinstance(templates, list):
        return {template["name"]: template["template"] for template in templates}
    return dict(templates)


@lru_cache(16)
def compiled(text: str) -> Template:
    """A template in the environment that transformers gives to it.

    Raises:
        jinja2.TemplateError: it is no template.
    """
    return _environment().from_string(text)


@lru_cache(1)
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Scope
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    class Generation(Extension):
        """The block in which templates write answers: its text, and variables of its own."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
