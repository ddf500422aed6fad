"""Texts are encoded in pieces whose ids are those of the whole, and no text is encoded twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from engines.protocol import FinishReason
from rollout.agents.model import text_pieces
from rollout.agents.model.alignment import first_difference, tokenised
from rollout.agents.model.families import ChatModel, load_chat_model
from rollout.agents.model.text_pieces import borders_of, pieces
from rollout.agents.plan import Plan, make_plan
from rollout.agents.turns.store import Session
from rollout.agents.turns.tree import Generated
from rollout.agents.wire.chat_request import ChatRequest
from rollout.agents.wire.messages import history_of
from tests.support.chat_models import write_chat_model

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers  # noqa: E402

WORDS = ["low", "lower", "é", "e\u0301", "  ", " ", "\n", "ab", "a", "1", "<", "|", "▁"]
CORPUS = ["low lower lowest ab abba e\u0301é 11 <|> \n new\n\nnewer"] * 4
ADDED = [
    AddedToken("<s>", special=True),
    AddedToken("</s>", special=True),
    AddedToken("<s><", special=True),
    AddedToken("ss", special=True),
    AddedToken("s>a", special=True),
    AddedToken("<left>", special=True, lstrip=True),
    AddedToken("<right>", special=True, rstrip=True),
    AddedToken("<word>", special=True, single_word=True),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("<Upper>", special=False, normalized=True),
    AddedToken(" x", special=True),
    AddedToken("-<s>-", special=True),
    AddedToken("a1", special=True),
]
NAMES = [token.content for token in ADDED]


def byte_level() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def unigram(prepend_scheme: str) -> Callable[[], Any]:
    def make() -> Any:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
        trainer = tokenizers.trainers.UnigramTrainer(
            vocab_size=60, unk_token="<unk>", special_tokens=["<unk>"]
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        return tokenizer

    return make


def llama_2() -> Any:
    """A text is one word, with a space before it that the normalizer writes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=80, special_tokens=["<unk>"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def word_piece() -> Any:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"])
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


KINDS = {
    "byte_level": byte_level,
    "unigram_first": unigram("first"),
    "unigram_always": unigram("always"),
    "llama_2": llama_2,
    "word_piece": word_piece,
}


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_pieces, "_PIECE_CHARACTERS", 1)
    monkeypatch.setattr(text_pieces, "_SEARCHED_CHARACTERS", 2)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer from a file, as a model's folder has it."""
    file = str(tmp_path_factory.mktemp(request.param) / "tokenizer.json")
    KINDS[request.param]().save(file)
    return file


def tokens_of(*names: str) -> list[Any]:
    return [token for token in ADDED if token.content in names]


@pytest.mark.usefixtures("short_pieces")
@example(tokens_of("<s>", "-<s>-"), ["low", "-<s>-", "low"])
@example(tokens_of("<word>", "a1"), ["<word>", "a1"])
@example(tokens_of("<right>", " x"), ["<right>", " x", "a"])
@example(tokens_of("<Upper>"), ["low", "<Upper>", "low"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.sampled_from(ADDED), max_size=len(ADDED), unique_by=lambda token: token.content),
    st.lists(st.sampled_from([*WORDS, *NAMES, *(name[:-1] for name in NAMES)]), max_size=20),
)
def test_the_ids_of_the_pieces_are_those_of_the_whole(
    kind: str, added: list[Any], parts: list[str]
) -> None:
    tokenizer = Tokenizer.from_file(kind)
    for token in added:
        tokenizer.add_special_tokens([token]) if token.special else tokenizer.add_tokens([token])
    borders = borders_of(tokenizer.get_added_tokens_decoder().values())
    text = "".join(parts)
    cut = list(pieces(text, borders))
    encodings = tokenizer.encode_batch_fast(cut, add_special_tokens=False)
    assert "".join(cut) == text
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert [one for encoding in encodings for one in encoding.ids] == whole


def test_marks_of_chats_are_borders_and_what_depends_on_its_sides_is_none() -> None:
    borders = borders_of(token for token in ADDED if token.content != "<s><")
    assert borders is not None
    found = [name for name in NAMES if borders.tokens.fullmatch(name)]
    assert found == ["</s>", "<right>", "<tool>"]
    assert borders_of(ADDED) is None  # a "<" may belong to ``<s><``
    assert borders_of([AddedToken("<Upper>", normalized=True)]) is None


# -- how much is encoded at once, and how often --------------------------------------------------


@dataclass
class CharacterTokenizer:
    """One id for each character, and what was encoded."""

    seen: list[str] = field(default_factory=list)

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> list[Any]:
        self.seen += texts
        return [CharacterIds([ord(character) for character in text]) for text in texts]

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids))


@dataclass
class CharacterIds:
    ids: list[int]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    return load_chat_model(str(write_chat_model(tmp_path_factory.mktemp("model"))))


def with_tokenizer(model: ChatModel, tokenizer: Any) -> ChatModel:
    return replace(model, chat=replace(model.chat, tokenizer=tokenizer))


PER_MESSAGE = 2000


def history_of_length(num: int) -> list[dict[str, Any]]:
    content = "x" * PER_MESSAGE
    messages = [{"role": "user", "content": f"{index} {content}"} for index in range(num // 2000)]
    return [*messages, {"role": "user", "content": "?"}]


def rendered(loaded: ChatModel, messages: list[dict[str, Any]]) -> str:
    return loaded.bound(None, {}).render(messages, for_answer=True)


@pytest.mark.parametrize("num", [1 << 20, 4 << 20, 0])
def test_no_call_encodes_more_than_some_thousand_characters(loaded: ChatModel, num: int) -> None:
    """Without the interpreter's lock, too: the double has no other method than the batch's."""
    counting = CharacterTokenizer()
    template = with_tokenizer(loaded, counting).bound(None, {})
    empty = "<|im_start|>user\n<|im_end|>\n" * 99_999
    text = rendered(loaded, history_of_length(num)) if num else empty
    ids, _ = tokenised(template, text)
    assert ids == [ord(character) for character in text]
    assert max(map(len, counting.seen)) < text_pieces._PIECE_CHARACTERS + 2 * PER_MESSAGE
    assert len(counting.seen) <= len(text) / text_pieces._PIECE_CHARACTERS + 1


def take_turn(
    model: ChatModel, session: Session, messages: list[dict[str, Any]], answer: str
) -> Any:
    """A turn of a session, as a chat makes it; its answer is cut off."""
    history = history_of(messages, None)
    plan = make_plan(model, ChatRequest(messages), history, session.tree.known(history))
    ids = [ord(character) for character in answer]
    made = Generated(ids, [0.0] * len(ids), (), FinishReason("length", None), answer)
    said = {"role": "assistant", "content": answer}
    session.tree.add(session.tree.made(plan.history, plan.prompt, made, said))
    messages.append(said)
    return plan


def ids_of(plan: Plan) -> list[int]:
    ids: list[int] = json.loads(plan.body)["input_ids"]
    assert len(ids) == plan.num_prompt
    return ids


def test_a_turn_encodes_what_is_new(loaded: ChatModel) -> None:
    counting = CharacterTokenizer()
    model, session = with_tokenizer(loaded, counting), Session(0.0)
    messages = history_of_length(1 << 20)
    take_turn(model, session, messages, "first")
    for number in range(3):
        counting.seen.clear()
        messages.append({"role": "user", "content": f"{number} " + "y" * 5000})
        plan = take_turn(model, session, messages, "next" * 1000)
        assert plan.prompt.drift == "clean"
        whole = rendered(loaded, messages[:-1])
        assert ids_of(plan) == [ord(character) for character in whole]
        # The new text as a prompt and to compare, and the text behind the last border.
        new = 2 * (5000 + 4000)
        assert sum(map(len, counting.seen)) < new + 2 * text_pieces._PIECE_CHARACTERS


def test_a_turn_that_differs_early_encodes_little(loaded: ChatModel) -> None:
    """The thinking that the template drops from the first answer makes all later text differ."""
    counting = CharacterTokenizer()
    model, session = with_tokenizer(loaded, counting), Session(0.0)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * 100_000}]
    take_turn(model, session, messages, "<think>t</think>\n\na")
    messages += history_of_length(1 << 20)
    take_turn(model, session, messages, "b")
    for _ in range(2):
        counting.seen.clear()
        messages.append({"role": "user", "content": "?"})
        plan = take_turn(model, session, messages, "c")
        assert plan.prompt.drift == "realigned"
        assert sum(map(len, counting.seen)) < 3 * text_pieces._PIECE_CHARACTERS


ANSWERS = st.sampled_from(["a", "<think>t</think>\n\nb", "<|im_end|>", "  "])
CONTENTS = st.sampled_from(["", "x", "<|im_start|>user\n", " y" * 30])


@pytest.mark.usefixtures("short_pieces")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(CONTENTS, ANSWERS, st.integers(0, 9)), min_size=1, max_size=6))
def test_the_first_difference_is_that_from_a_tokenisation_of_the_whole(
    loaded: ChatModel, turns: list[tuple[str, str, int]]
) -> None:
    """Whatever the template does to earlier texts, and in all branches of a session."""
    model, session = with_tokenizer(loaded, CharacterTokenizer()), Session(0.0)
    messages: list[dict[str, Any]] = []
    for content, answer, back in turns:
        if back < 2:  # another branch
            messages = messages[: 2 * back]
        messages.append({"role": "user", "content": content})
        plan = take_turn(model, session, messages, answer)
        anew = [ord(character) for character in rendered(loaded, messages[:-1])]
        assert plan.prompt.first_difference == first_difference(ids_of(plan), anew)


def test_other_threads_run_while_a_long_message_is_encoded(loaded: ChatModel) -> None:
    """It has no border within it, so it is encoded at once."""
    text = "word " * (1 << 18)
    beats, is_over = [0], threading.Event()

    def beat() -> None:
        while not is_over.wait(0.001):
            beats[0] += 1

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    before = beats[0]
    (piece,) = loaded.chat.pieces(text, 0)
    during = beats[0] - before
    is_over.set()
    thread.join()
    assert len(piece[1]) == len(text)
    assert during > 20
