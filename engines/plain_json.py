"""JSON that somebody else wrote: a file in a shared place, a checkpoint, a reply.

Always true: what is wrong with it is a ``ValueError``.  ``json`` itself raises ``RecursionError``
where it is nested deeply, and so does whatever walks through a value that it could just read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST_DEPTH = 200
"""Lists and objects within each other; orjson writes 254."""
WRONG_FORM = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What code can raise that takes values out of JSON, which may have any form."""


def read_json(data: bytes | str) -> Any:
    """The value.

    Raises:
        ValueError: it is not JSON, or nested more deeply than ``MOST_DEPTH``.
    """
    try:
        value = json.loads(data)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(data, value)
    return value


def object_in(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        OSError, ValueError: it cannot be read, or is no object.
    """
    value = read_json(file.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    return value


def check_depth(data: bytes | str, value: Any) -> None:
    """Check how deeply the value in ``data`` is nested.

    Raises:
        ValueError: more than ``MOST_DEPTH``.
    """
    if isinstance(data, str):
        num_opened = data.count("[") + data.count("{")
    else:
        num_opened = data.count(b"[") + data.count(b"{")
    if num_opened > MOST_DEPTH and _is_deeper(value, MOST_DEPTH):
        raise ValueError(_TOO_DEEP)


_TOO_DEEP = f"JSON is nested more than {MOST_DEPTH} deep"


def _is_deeper(value: Any, depth: int) -> bool:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth + 1):
        within = [value.values() if isinstance(value, dict) else value for value in level]
        level = [item for part in within for item in part if isinstance(item, dict | list)]
        if not level:
            return False
    return True
