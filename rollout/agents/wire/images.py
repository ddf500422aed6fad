"""Images in the messages of a chat: their form, and what is refused (pure).

Always true: an image is in the request itself, as a data URL.  Nothing that a client names is
fetched or opened, here or by an engine.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

MAX_IMAGES = 64
"""Most images of one chat."""
_DATA_URL = re.compile(r"data:image/(?:png|jpeg|webp);base64,")
_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF")
_ROLES = ("user", "tool")


class BadImage(ValueError):
    """An image that a session does not take, and why."""


def read_image(part: Mapping[str, Any], role: str) -> dict[str, str]:
    """A part ``{"type": "image_url", "image_url": {"url": ...}}`` as chat templates expect it:
    ``{"type": "image", "image": url}``.

    Raises:
        BadImage: it has another form.
    """
    if role not in _ROLES:
        raise BadImage(f"a message of role {role!r:.20} has no images; a user's or a tool's may")
    given = part.get("image_url")
    given = given if isinstance(given, Mapping) else {"url": given}
    url, detail = given.get("url"), given.get("detail")
    if detail not in (None, "auto"):
        raise BadImage(
            f"an image has no detail {detail!r:.20}: the model's image processor decides"
        )
    found = _DATA_URL.match(url) if isinstance(url, str) else None
    if not isinstance(url, str) or found is None:
        raise BadImage(
            "an image must be a data URL (data:image/png;base64,... or jpeg or webp); a session "
            f"fetches no others: {url!r:.40}"
        )
    try:
        data = binascii.a2b_base64(url[found.end() :], strict_mode=True)
    except ValueError as error:
        raise BadImage(f"an image's data is no base64: {error}") from None
    if not data.startswith(_BEGINNINGS):
        raise BadImage("an image's data is no PNG, JPEG or WebP")
    return {"type": "image", "image": url}


def images_of(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    """The data URLs of all images of messages that were read, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [part["image"] for part in parts if part["type"] == "image"]


def digest_of(url: str) -> str:
    """SHA-256 of an image's file, as hex: samples name it so."""
    return sha256(binascii.a2b_base64(url.partition(",")[2])).hexdigest()
