"""The text of ids that come in pieces is that of all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.agents.model.chat_tokenizer import ChatTokenizer, load_chat_tokenizer
from rollout.agents.model.reply_text import Marks, ReplyText, marks_of
from tests.support.chat_models import write_chat_model

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

SPECIAL = ("<mark>", "<hidden>")


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder: Path = tmp_path_factory.mktemp("model")
    return load_chat_tokenizer(str(write_chat_model(folder, special=SPECIAL)))


def marks_in(chat: ChatTokenizer) -> Marks:
    return marks_of(("<mark>", "<text>", "</text>"), chat.added.get, chat.special)


def read(chat: ChatTokenizer, pieces: list[list[int]]) -> str:
    source = ReplyText(chat.decode, marks_in(chat))
    tokens = [token for piece in pieces for token in source.feed(piece)]
    return "".join([*tokens, *source.rest()])


@given(data=st.data())
def test_texts_do_not_depend_on_where_the_ids_are_cut(chat: ChatTokenizer, data: Any) -> None:
    """Also bytes that are no characters: one token here is a byte."""
    whole = st.sampled_from(["é", "\U0001f600", "<text>", "<mark>", "<hidden>", "a<te", " "])
    known = whole.map(chat.encode)
    parts = data.draw(st.lists(known | st.lists(st.integers(0, 255), max_size=5), max_size=8))
    ids = [one for part in parts for one in part]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=8)))
    pieces = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    (hidden,) = chat.encode("<hidden>")
    runs: list[list[int]] = [[]]
    for one in ids:
        runs.append([]) if one in chat.special else runs[-1].append(one)
        if chat.special.get(one) == "<mark>":
            runs += [[one], []]
    assert read(chat, pieces) == "".join(map(chat.decode, runs))
    assert hidden not in marks_in(chat).ids


def test_bytes_of_no_character_are_decoded_few_times(chat: ChatTokenizer) -> None:
    """A collapsed model may write the first byte of a character without end."""
    (first, *_) = chat.encode("\U0001f600")
    decoded = []

    def decode(ids: Any) -> str:
        decoded.append(len(ids))
        return chat.decode(ids)

    num = 1 << 14
    source = ReplyText(decode, marks_in(chat))
    text = "".join(token for _ in range(num) for token in source.feed([first]))
    text += "".join(source.rest())
    assert text == "\N{REPLACEMENT CHARACTER}" * num
    assert sum(decoded) < 8 * num
