"""Images in the ids of a prompt (pure).

Always true: engines get one placeholder for each image and the images in the same order, and
report the ids that they computed; these have each placeholder several times, and otherwise are the
ids that were sent, or the turn is not kept.  So the same placeholder in a text of a client, or
sampled by the model, is refused beside images: it would get the next image.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.agents.wire.images import MAX_IMAGES, digest_of
from rollout.agents.wire.messages import BadChat

_NAMES = ("image_token_id", "image_token_index", "media_placeholder_token_id")


@dataclass(frozen=True, slots=True)
class Images:
    """The images that a turn's prompt adds to its parent's.

    Attributes:
        placeholder: id of the token that stands for an image.
        digests: of their files, in order.
        sizes: tokens of each, as the engine reported them, or empty before that.
    """

    placeholder: int = 0
    digests: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    @property
    def num_added(self) -> int:
        """Tokens that they have beside their placeholders."""
        return sum(self.sizes) - len(self.sizes)

    def expanded(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids that the engine computed for these ids, which have one placeholder for each."""
        if not self.sizes:
            return ids
        sizes, found = iter(self.sizes), array("I")
        for token_id in ids:
            found.extend([token_id] * (next(sizes) if token_id == self.placeholder else 1))
        return found


NO_IMAGES = Images()


def placeholder_in(config: Mapping[str, Any]) -> int | None:
    """The token that stands for an image, by a model's ``config.json``, or None for one of text."""
    found = (config.get(name) for name in _NAMES)
    return next((token_id for token_id in found if isinstance(token_id, int)), None)


def placed(
    urls: Sequence[str], num_known: int, known: Sequence[int], new: Sequence[int], token: int | None
) -> Images:
    """The images of a turn's own messages.

    Args:
        urls: of all images of the chat, in order.
        num_known: those of the messages that the turn continues.
        known: the ids that the turn continues.
        new: the ids behind these.
        token: see ``placeholder_in``.

    Raises:
        BadChat: there are more than a session takes, or the ids do not have one placeholder for
            each.
    """
    if not urls:
        return NO_IMAGES
    if token is None:
        raise BadChat("the model takes no images: its config.json names no image_token_id")
    if len(urls) > MAX_IMAGES:
        raise BadChat(f"a chat of a session has at most {MAX_IMAGES} images: {len(urls)}")
    for ids, num, where in (
        (known, num_known, "an answer of the model has that token"),
        (new, len(urls) - num_known, "a text has that token, or the template writes none"),
    ):
        if ids.count(token) != num:
            raise BadChat(
                f"the prompt has the image token {token} {ids.count(token)} times for {num} images"
                f" ({where}): they would not get their own places"
            )
    return Images(token, tuple(map(digest_of, urls[num_known:])))


def fields_of(urls: Sequence[str], images: Images) -> dict[str, Any]:
    """The fields of ``/generate`` that go with a turn's ids; none without images.

    The engine's ids are requested only where the size of an image is not known yet: a request for
    them is not continued by another engine, but begun again.
    """
    if not urls:
        return {}
    fields: dict[str, Any] = {"image_data": list(urls)}
    return fields | {"return_prompt_token_ids": True} if images.digests else fields


def measured(images: Images, num_before: int, sent: Sequence[int], reported: Any) -> Images:
    """The same images with their sizes.

    Args:
        num_before: images of the turns that this one continues.
        sent: all ids of the prompt.
        reported: those that the engine computed.

    Raises:
        ValueError: the engine did not report them, or other ids than were sent.
    """
    if not images.digests:
        return images
    if not isinstance(reported, list | tuple):
        raise ValueError("the engine did not report the ids of a prompt with images")
    sizes, at, token = list[int](), 0, images.placeholder
    for token_id in sent:
        begin = at
        if token_id == token:
            while at < len(reported) and reported[at] == token:
                at += 1
            sizes.append(at - begin)
        elif at < len(reported) and reported[at] == token_id:
            at += 1
        if at == begin:
            raise ValueError(f"the engine changed the ids of a prompt with images at {begin}")
    if at != len(reported):
        raise ValueError(f"the engine added {len(reported) - at} ids to a prompt with images")
    return replace(images, sizes=tuple(sizes[num_before:]))
