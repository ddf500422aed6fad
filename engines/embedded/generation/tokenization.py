"""Between text and token ids: prompts, chat templates, completions, stop strings, streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engines.embedded.core.errors import Invalid
from engines.embedded.generation.generation import Generation, StopFinder
from engines.embedded.generation.sampling_params import Params
from engines.http.chat_template import (
    compiled,
    read_tokenizer,
    special_tokens,
    template_texts,
    tokenizer_settings,
)
from engines.plain_json import WRONG_FORM

_RESERVED = frozenset({"messages", "add_generation_prompt"})
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """A tokenizer with the special tokens and chat templates that the model's files define.

    Args:
        templates: texts of the chat templates by name; without a ``default`` there are none.
        special_tokens: what templates know as ``bos_token``, ``eos_token`` and so on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str],
        eos_ids: frozenset[int],
        vocabulary_size: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._special_tokens = special_tokens
        self.eos_ids = eos_ids
        self.vocabulary_size = vocabulary_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        """The prompt of these messages.

        Args:
            options: ``tools``, and more variables of the template.

        Raises:
            Invalid: there is no template, or it refuses the messages.
        """
        if not self._templates.get("default"):
            raise Invalid("the model's tokenizer has no chat template; use /v1/completions")
        if taken := sorted(_RESERVED & options.keys()):
            raise Invalid(f"chat_template_kwargs must not have {', '.join(taken)}")
        name = "default" if options.get("tools") is None else "tool_use"
        template = self._templates.get(name, self._templates["default"])
        variables = {"tools": None, "documents": None, **self._special_tokens, **options}
        try:
            text = compiled(template).render(
                messages=list(messages), add_generation_prompt=True, **variables
            )
        except Exception as error:  # a template is a program and raises what it likes
            raise Invalid(f"the chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], params: Params) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=params.skip_special_tokens)

    def token(self, token_id: int) -> str:
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def completion(self, generation: Generation) -> str:
        """The text of a completion, ending before what stopped it unless ``no_stop_trim``."""
        ids, params, reason = generation.output_ids, generation.params, generation.finish_reason
        matched = reason.get("matched") if reason else None
        if matched is None or params.no_stop_trim:
            return self.decode(ids, params)
        if isinstance(matched, int):
            return self.decode(ids[:-1], params)
        text = self.decode(ids, params)
        # One that came before the minimum did not count; otherwise the first ended it.
        cut = text.rfind(matched) if params.min_new_tokens else text.find(matched)
        return text if cut < 0 else text[:cut]

    def stop_finder(self, params: Params) -> StopFinder | None:
        """A search of a completion's last tokens for the stop strings, or None if there are
        none."""
        if not params.stop:
            return None
        # A token is at least a byte, so a match that the newest token ends starts within this.
        window = max(len(stop.encode()) for stop in params.stop) + 8

        def find(ids: Sequence[int]) -> str | None:
            tail = self.decode(ids[-window:], params)
            return next((stop for stop in params.stop if stop in tail), None)

        return find


def load_text(folder: Path, eos_ids: frozenset[int], vocabulary_size: int) -> TextCodec:
    """What a model's folder says of texts.

    Args:
        eos_ids: of the model; the tokenizer's joins them, as with SGLang.

    Raises:
        OSError, ValueError: the folder has no tokenizer that can be read; one sentence.
    """
    tokenizer = _read_tokenizer(folder)
    try:
        settings = tokenizer_settings(folder)
        names = special_tokens(settings)
        _add_tokens(tokenizer, settings, names)
        templates = template_texts(folder, settings)
    except WRONG_FORM as error:
        raise ValueError(f"tokenizer_config.json cannot be read: {error}") from error
    eos = tokenizer.token_to_id(names.get("eos_token", ""))
    all_eos = eos_ids if eos is None else eos_ids | {eos}
    return TextCodec(tokenizer, templates, names, all_eos, vocabulary_size)


def _read_tokenizer(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            "its folder has no tokenizer.json, and the embedded engine reads no other tokenizer; "
            "save_pretrained of transformers' AutoTokenizer writes one"
        )
    try:
        return read_tokenizer(file)
    except ValueError as error:
        raise ValueError(f"tokenizer.json cannot be read: {error}") from error


def _add_tokens(
    tokenizer: Tokenizer, settings: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Make the tokens of the settings known, as transformers does."""
    added: dict[str, dict[str, Any]] = settings.get("added_tokens_decoder") or {}
    tokenizer.add_tokens([AddedToken(**added[key]) for key in sorted(added, key=int)])
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    tokens = extra.values() if isinstance(extra, dict) else extra
    texts = [token["content"] if isinstance(token, dict) else token for token in tokens]
    present = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = [text for text in (*names.values(), *texts) if text not in present]
    tokenizer.add_tokens([AddedToken(text, special=True) for text in new])


class StreamText:
    """The text of a growing completion, each token decoded a bounded number of times.

    Text is held back while it ends in the middle of a character.
    """

    def __init__(self, text: TextCodec, params: Params) -> None:
        self._text = text
        self._params = params
        self._done = ""
        self._start = 0  # tokens before this are wholly in the text...
        self._read = 0  # ...and up to this they are decoded again, for their neighbours' spaces

    def update(self, ids: Sequence[int]) -> str:
        before = self._text.decode(ids[self._start : self._read], self._params)
        now = self._text.decode(ids[self._start :], self._params)
        if len(now) > len(before) and not now.endswith(_INCOMPLETE):
            self._done += now[len(before) :]
            self._start, self._read = self._read, len(ids)
        return self._done
