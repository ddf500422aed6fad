"""Images in a chat: their form, their places in a prompt, and what a turn keeps of them."""

from __future__ import annotations

import base64
import json
from array import array
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.protocol import FinishReason, GenerateReply
from rollout.agents.model.families import load_chat_model
from rollout.agents.model.images import NO_IMAGES, Images, fields_of, measured, placed
from rollout.agents.plan import Plan, make_plan, measured_plan, read_in
from rollout.agents.turns.tree import Generated, Known, TurnTree
from rollout.agents.wire.images import MAX_IMAGES, digest_of, images_of
from rollout.agents.wire.messages import BadChat, history_of, read_messages
from rollout.driver.client.branch_samples import branch_samples
from tests.support.chat_models import write_chat_model
from tests.support.qwen3_vl import TEMPLATE

PAD = 9
MARKS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def url(data: bytes = b"one", kind: str = "png") -> str:
    begin = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}[kind]
    return f"data:image/{kind};base64,{base64.b64encode(begin + data).decode()}"


def image(data: bytes = b"one") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


# -- their form -----------------------------------------------------------------------------


def test_parts_without_images_are_one_text() -> None:
    (message,) = read_messages([{"role": "user", "content": [text("a"), text("b")]}])
    assert message["content"] == "ab"


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_an_image_is_a_part_as_templates_expect_it(kind: str) -> None:
    given = url(kind=kind)
    content = [text("a"), {"type": "image_url", "image_url": {"url": given, "detail": "auto"}}]
    (message,) = read_messages([{"role": "user", "content": content}])
    assert message["content"] == [text("a"), {"type": "image", "image": given}]
    assert images_of([message, {"role": "user", "content": "b"}]) == [given]
    data = base64.b64decode(given.partition(",")[2])
    assert digest_of(given) == sha256(data).hexdigest()


def test_another_image_is_another_message() -> None:
    histories = [
        history_of(read_messages([{"role": "user", "content": [image(data)]}]), None).loose
        for data in (b"one", b"one", b"two")
    ]
    assert histories[0] == histories[1] != histories[2]


@pytest.mark.parametrize(
    ("role", "part", "why"),
    [
        ("user", {"type": "image_url", "image_url": {"url": "http://a/b.png"}}, "no others"),
        ("user", {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "no others"),
        ("user", {"type": "image_url", "image_url": {"url": "/etc/hosts.png"}}, "no others"),
        ("user", {"type": "image_url"}, "must be a data URL"),
        ("user", {"type": "image_url", "image_url": {"url": [1]}}, "must be a data URL"),
        ("user", {"type": "image_url", "image_url": "data:image/gif;base64,AAAA"}, "data URL"),
        ("user", {"type": "image_url", "image_url": "data:image/png;base64,A"}, "no base64"),
        ("user", {"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, "no PNG, JPEG"),
        ("user", {"type": "image_url", "image_url": {"url": url(), "detail": "low"}}, "detail"),
        ("user", {"type": "input_audio"}, "must be text and images"),
        ("user", "a", "must be text and images"),
        ("assistant", image(), "a user's or a tool's"),
        ("system", image(), "a user's or a tool's"),
    ],
)
def test_what_is_no_image_of_a_session_is_refused(role: str, part: Any, why: str) -> None:
    with pytest.raises(BadChat, match=rf"messages\[0\].*{why}"):
        read_messages([{"role": role, "content": [part]}])


# -- their places ---------------------------------------------------------------------------


def test_each_image_has_one_place() -> None:
    urls = [url(b"a"), url(b"b"), url(b"c")]
    images = placed(urls, 1, [1, PAD, 2], [3, PAD, 4, PAD], PAD)
    assert images == Images(PAD, (digest_of(urls[1]), digest_of(urls[2])))
    assert fields_of(urls, images) == {"image_data": urls, "return_prompt_token_ids": True}
    again = placed(urls, 3, [PAD, 1, PAD, 2, PAD], [4], PAD)
    assert again.digests == ()
    # The sizes of all are known: the request goes on at another engine.
    assert fields_of(urls, again) == {"image_data": urls}
    assert fields_of([], NO_IMAGES) == {}
    assert placed([], 0, [PAD], [PAD], None) == NO_IMAGES


@pytest.mark.parametrize(
    ("num", "num_known", "known", "new", "token", "why"),
    [
        (1, 0, [], [1, PAD], None, "takes no images"),
        (MAX_IMAGES + 1, 0, [], [PAD] * (MAX_IMAGES + 1), PAD, f"at most {MAX_IMAGES} images"),
        (1, 0, [], [1, 2], PAD, "0 times for 1 images .*the template writes none"),
        (1, 0, [], [PAD, 2, PAD], PAD, "2 times for 1 images .*a text has that token"),
        (2, 1, [PAD, 1, PAD], [PAD], PAD, "2 times for 1 images .*an answer of the model"),
        (1, 1, [PAD], [PAD], PAD, "1 times for 0 images"),
    ],
)
def test_an_image_without_its_own_place_is_refused(
    num: int, num_known: int, known: list[int], new: list[int], token: int | None, why: str
) -> None:
    with pytest.raises(BadChat, match=why):
        placed([url()] * num, num_known, known, new, token)


@given(st.lists(st.tuples(st.integers(10, 20), st.integers(0, 5))), st.data())
def test_what_an_engine_computed_is_what_was_sent_with_the_tokens_of_images(
    parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each part is a token of text and the size of the image behind it, 0 for none."""
    sent, computed = array("I"), list[int]()
    for token, size in parts:
        sent.extend([token, *([PAD] if size else [])])
        computed += [token] + [PAD] * size
    sizes = [size for _, size in parts if size]
    num_before = data.draw(st.integers(0, len(sizes)))
    images = Images(PAD, tuple(map(str, sizes[num_before:])))
    if not images.digests:
        assert measured(images, num_before, sent, None) is images
        return
    found = measured(images, num_before, sent, computed)
    assert list(found.sizes) == sizes[num_before:]
    assert found.num_added == sum(found.sizes) - len(found.sizes)
    whole = Images(PAD, tuple(map(str, sizes)), tuple(sizes))
    assert list(whole.expanded(sent)) == computed
    at = data.draw(st.integers(0, len(computed) - 1))
    for other in (
        [*computed[:at], 99, *computed[at + 1 :]],
        [*computed[:at], 99, *computed[at:]],
        [*computed, 99],
        [one for one in computed if one != PAD],
        None,
    ):
        with pytest.raises(ValueError, match="prompt with images"):
            measured(images, num_before, sent, other)


def test_two_images_without_a_token_between_them_are_refused() -> None:
    """Which tokens are whose is not known."""
    with pytest.raises(ValueError, match="changed the ids"):
        measured(Images(PAD, ("a", "b")), 0, [1, PAD, PAD], [1, PAD, PAD, PAD])


# -- turns ----------------------------------------------------------------------------------


class Chat:
    """A session whose engine gives each image a size: the length of its URL."""

    def __init__(self, folder: Path) -> None:
        write_chat_model(folder, TEMPLATE, special=MARKS)
        pad = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        self.pad = next(one["id"] for one in pad if one["content"] == MARKS[1])
        (folder / "config.json").write_text(json.dumps({"image_token_id": self.pad}))
        self.model = load_chat_model(str(folder))
        self.tree = TurnTree()
        self.bodies: list[dict[str, Any]] = []

    def ask(self, messages: list[Any], ids: list[int], **options: Any) -> Plan:
        body = json.dumps({"messages": messages, **options}).encode()
        read = read_messages(messages)
        begun = read.pop()["content"] if options.get("continue_final_message") else ""
        plan = make_plan(self.model, *read_in(body), self.tree.known(history_of(read, []), begun))
        self.bodies.append(json.loads(plan.body))
        computed = tuple(self.computed(self.bodies[-1]))
        wanted = computed if self.bodies[-1].get("return_prompt_token_ids") else None
        reply = GenerateReply("r", "", tuple(ids), None, None, len(computed), prompt_ids=wanted)
        plan = measured_plan(plan, self.tree, reply)
        assert plan.num_prompt == len(computed)
        finish = FinishReason("length")
        made = Generated(ids, [-0.5] * len(ids), (), finish, self.model.chat.decode(ids))
        answer = {"role": "assistant", "content": begun + made.text}
        self.tree.add(self.tree.made(plan.history, plan.prompt, made, answer))
        return plan

    def computed(self, body: dict[str, Any]) -> list[int]:
        sizes = iter([len(one) for one in body.get("image_data", [])])
        ids = body["input_ids"]
        return [two for one in ids for two in [one] * (next(sizes) if one == self.pad else 1)]

    def turns(self) -> list[dict[str, Any]]:
        return [json.loads(b"".join(turn.json())) for turn in self.tree.turns]


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    return Chat(tmp_path / "model")


def test_turns_have_the_ids_that_the_engine_computed(chat: Chat) -> None:
    first = {"role": "user", "content": [text("a"), image(b"1"), image(b"22")]}
    history: list[Any] = [first]
    chat.ask(history, [65, 66])
    history += [{"role": "assistant", "content": chat.turns()[0]["text"]}]
    history += [{"role": "user", "content": [image(b"333"), text("b")]}]
    chat.ask(history, [67, 68])
    history += [{"role": "assistant", "content": chat.turns()[1]["text"]}]
    history += [{"role": "user", "content": "c"}]
    chat.ask(history, [69])
    turns, urls = chat.turns(), [url(b"1"), url(b"22"), url(b"333")]
    assert [turn["parent"] for turn in turns] == [None, 0, 1]
    assert [body["image_data"] for body in chat.bodies] == [urls[:2], urls, urls]
    assert [body.get("return_prompt_token_ids") for body in chat.bodies] == [True, True, None]
    assert (
        chat.bodies[2]["input_ids"][: len(chat.bodies[1]["input_ids"])]
        == (chat.bodies[1]["input_ids"])
    )
    (sample,) = branch_samples("s", turns)
    assert [*sample.prompt_ids, *sample.output_ids] == [*chat.computed(chat.bodies[2]), 69]
    assert sample.metadata["images"] == [digest_of(one) for one in urls]
    assert sum(sample.mask) == 5


def test_an_answer_that_goes_on_has_the_images_of_its_question(chat: Chat) -> None:
    question = {"role": "user", "content": [image(b"1")]}
    chat.ask([question], [65])
    begun = {"role": "assistant", "content": chat.turns()[0]["text"]}
    chat.ask([question, begun], [66], continue_final_message=True)
    assert [turn["parent"] for turn in chat.turns()] == [None, 0]
    assert chat.bodies[1]["input_ids"] == [*chat.bodies[0]["input_ids"], 65]
    assert chat.bodies[1]["image_data"] == [url(b"1")]


def test_an_engine_that_computed_another_prompt_is_not_believed(chat: Chat) -> None:
    messages = [{"role": "user", "content": [image(b"1")]}]
    read = read_in(json.dumps({"messages": messages}).encode())
    plan = make_plan(chat.model, *read, chat.tree.known(read[1]))
    computed = chat.computed(json.loads(plan.body))
    for prompt_ids, num in (
        (None, len(computed)),
        ((*computed[:2], 1, *computed[3:]), len(computed)),
        (tuple(computed), len(computed) + 1),
    ):
        reply = GenerateReply("r", "", (), None, None, num, prompt_ids=prompt_ids)
        with pytest.raises(ValueError, match=r"prompt with images|the engine computed"):
            measured_plan(plan, chat.tree, reply)


def test_a_model_of_text_takes_no_images(tmp_path: Path) -> None:
    model = load_chat_model(str(write_chat_model(tmp_path / "model", TEMPLATE)))
    messages = [{"role": "user", "content": [image()]}]
    with pytest.raises(BadChat, match="the model takes no images"):
        make_plan(model, *read_in(json.dumps({"messages": messages}).encode()), Known())
