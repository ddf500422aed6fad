"""An image that has its name in its file: the same picture, in another file for each name."""

from __future__ import annotations

import base64
import io

import pytest

from engines.protocol import PromptImage


def test_each_name_is_a_file_with_the_same_picture() -> None:
    images = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    images.linear_gradient("L").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    named = [PromptImage(url, name).named_by_file() for name in ("a1", "b2", "a1")]
    assert named[0] == named[2] != named[1]
    for one, name in zip(named, ("a1", "b2"), strict=False):
        read = images.open(io.BytesIO(base64.b64decode(one.data.partition(",")[2])))
        assert read.tobytes() == images.linear_gradient("L").tobytes()
        assert (read.text, one.digest) == ({"name": name}, "")
