"""The chat template and tokenizer of a model's folder.  jinja2 and tokenizers, of the extra
``agents``, are imported by the first request that needs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from engines.http.chat_template import (
    compiled,
    object_or_empty,
    special_tokens,
    template_texts,
    tokenizer_settings,
)
from rollout.agents.model.images import placeholder_in
from rollout.agents.model.text_pieces import Borders, borders_of, pieces
from rollout.agents.wire.messages import BadChat, Message, with_texts
from rollout.core.optional_deps import optional_import
from rollout.router.tokenizer_file import load_tokenizer, no_tokenizer

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class Check(Protocol):
    """Called often by work that others wait for: it raises where the work is not wanted any more,
    and gives way to them."""

    def __call__(self) -> None: ...

    def aside(self, num_characters: int) -> AbstractContextManager[None]:
        """Around work on a text that does not hold the interpreter's lock."""
        ...


class Unchecked:
    """A check that never stops the work: its result is wanted whatever it takes."""

    def __call__(self) -> None:
        pass

    def aside(self, num_characters: int) -> AbstractContextManager[None]:
        return nullcontext()


UNCHECKED = Unchecked()
_check: ContextVar[Check] = ContextVar("check", default=UNCHECKED)


@contextmanager
def checked(check: Check) -> Iterator[None]:
    """Calls ``check`` as messages are rendered, and before a text is tokenised."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def check_client() -> None:
    """Raises if the client of this work has left, and gives way to others."""
    _check.get()()


@dataclass(frozen=True, slots=True)
class ChatTokenizer:
    """Chat template and tokenizer of one model; safe in several threads.

    Attributes:
        templates: by name; ``default``, and ``tool_use`` where the model has one, or empty for
            none.
        texts: of the templates, by name.
        special_tokens: what templates know as ``bos_token``, ``eos_token`` and so on.
        added: ids of the added tokens, by text.
        special: texts of those that are special, by id.
        borders: where texts are cut, or None if they cannot be.
        image_token: stands for an image in a prompt, or None for a model of text.
    """

    tokenizer: Tokenizer
    templates: Mapping[str, Template]
    texts: Mapping[str, str]
    special_tokens: Mapping[str, str]
    added: Mapping[str, int]
    special: Mapping[int, str]
    borders: Borders | None
    image_token: int | None = None

    @property
    def tool_template(self) -> str:
        """Text of the template for requests with tools, or empty for none."""
        return self.texts.get("tool_use", self.texts.get("default", ""))

    def pieces(self, text: str, begin: int = 0) -> Iterator[tuple[str, list[int]]]:
        """The text from the border at ``begin`` on, in pieces with their ids."""
        for piece in pieces(text, self.borders, begin):
            with _check.get().aside(len(piece)):
                # ``encode`` holds the interpreter's lock until it is done, and this one does not.
                (encoding,) = self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)
            yield piece, encoding.ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for _, new in self.pieces(text):
            ids += new
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text with special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone; a part of a character is U+FFFD."""
        return self.tokenizer.decode_batch(
            [[token_id] for token_id in ids], skip_special_tokens=False
        )

    def bound(self, tools: Any, options: Mapping[str, Any]) -> BoundTemplate:
        """The template for one request.

        Args:
            options: variables of the template, for example ``enable_thinking``.

        Raises:
            BadChat: an option has a reserved name.
        """
        if taken := sorted(_RESERVED & options.keys()):
            raise BadChat(f"chat_template_kwargs must not have {', '.join(taken)}")
        template = self.templates["default"]
        if tools:
            template = self.templates.get("tool_use", template)
        variables = {"documents": None, **self.special_tokens, **options, "tools": tools or None}
        return BoundTemplate(self, template, variables)


@dataclass(frozen=True, slots=True)
class BoundTemplate:
    """A template with the variables of one request (see ``alignment.Template``)."""

    source: ChatTokenizer
    template: Template
    variables: Mapping[str, Any]

    def pieces(self, text: str, begin: int = 0) -> Iterator[tuple[str, list[int]]]:
        return self.source.pieces(text, begin)

    def has_border(self, text: str, index: int) -> bool:
        borders = self.source.borders
        return borders is not None and borders.is_at(text, index)

    def render(self, messages: Sequence[Message], *, for_answer: bool) -> str:
        """Raises BadChat if the template refuses the messages."""
        options = {"add_generation_prompt": for_answer, **self.variables}
        try:
            return self._rendered(messages, options)
        except Exception as error:  # a template is a program and raises what it likes
            with suppress(Exception):  # some, as DeepSeek's, add a call's arguments to a text
                return self._rendered(with_texts(messages), options)
            raise BadChat(f"the chat template refused the messages: {error}") from error

    def _rendered(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        parts = []
        for part in self.template.generate(messages=messages, **options):
            parts.append(part)
            check_client()
        return "".join(parts)


def load_chat_tokenizer(folder: str) -> ChatTokenizer:
    """Read the files of a model's folder.

    Raises:
        ConfigError: a package is missing, or a file cannot be read; the message says what to
            set or install.
    """
    with optional_import("agents", "sessions need jinja2 and tokenizers"):
        import jinja2  # noqa: F401 - ``compiled`` needs it
    path, tokenizer = Path(folder), load_tokenizer(folder)
    try:
        settings = tokenizer_settings(path)
        texts = {name: text for name, text in template_texts(path, settings).items() if text}
        templates = {name: compiled(text) for name, text in texts.items()}
        image_token = placeholder_in(object_or_empty(path / "config.json"))
    except Exception as error:  # jinja2 has many
        raise no_tokenizer(folder, f"the tokenizer in {folder} cannot be read: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    return ChatTokenizer(
        tokenizer,
        templates,
        texts,
        special_tokens(settings),
        {token.content: token_id for token_id, token in added.items()},
        {token_id: token.content for token_id, token in added.items() if token.special},
        borders_of(added.values()),
        image_token,
    )
