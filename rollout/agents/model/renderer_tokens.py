"""What renderers need of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollout.agents.model.chat_tokenizer import ChatTokenizer


class RendererTokens:
    """A model's tokenizer as ``renderers.Tokenizer``.

    It gives no offsets of characters: renderers need them for masks of content, which sessions
    have from the ids themselves, and would look at each token for them.
    """

    def __init__(self, chat: ChatTokenizer, name: str) -> None:
        self._chat = chat
        self.name_or_path = name
        special = chat.special_tokens
        self.eos_token_id = self._id_of(special.get("eos_token"))
        self.unk_token_id = self._id_of(special.get("unk_token"))
        self.all_special_tokens = list(chat.special.values())
        self.chat_template = chat.tool_template

    def _id_of(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self._chat.tokenizer.token_to_id(token)
        return found

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self._chat.encode(text)

    def decode(self, ids: Sequence[int], *_: Any, **options: Any) -> str:
        skips = bool(options.get("skip_special_tokens", False))
        text: str = self._chat.tokenizer.decode(list(ids), skip_special_tokens=skips)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._id_of(tokens)
        return [self._id_of(token) for token in tokens]
