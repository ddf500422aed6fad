"""Between text and token ids: prompts, chat templates, completions, stop strings, streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engines.embedded.core.errors import Invalid
from engines.embedded.generation.generation import Generation, StopFinder
from engines.embedded.generation.sampling_params import Params

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """A tokenizer with the special tokens that the model's files define."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], vocabulary_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.vocabulary_size = vocabulary_size

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        if not self._tokenizer.chat_template:
            raise Invalid("the model's tokenizer has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as error:  # a template is a program and raises what it likes
            raise Invalid(f"the chat template refused the messages: {error}") from error
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], params: Params) -> str:
        text: str = self._tokenizer.decode(
            ids,
            skip_special_tokens=params.skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text

    def token(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id])
        return text

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
        """A search of a completion's last tokens for the stop strings; None if there are none."""
        if not params.stop:
            return None
        # A token is at least a byte, so a match that the newest token ends starts within this.
        window = max(len(stop.encode()) for stop in params.stop) + 8

        def find(ids: Sequence[int]) -> str | None:
            tail = self.decode(ids[-window:], params)
            return next((stop for stop in params.stop if stop in tail), None)

        return find


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
