"""All readers of foreign bytes: ``READERS`` has each of them once."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from tools.fuzz import of_files, of_http, of_replies, of_tensors, of_wire
from tools.fuzz.reader import Reader

READERS: Mapping[str, Reader] = {
    reader.name: reader
    for module in (of_http, of_replies, of_wire, of_tensors, of_files)
    for reader in module.readers()
}


def lacks(reader: Reader) -> str:
    """The first package that it needs and that is not installed; empty if there is none."""
    return next((name for name in reader.needs if find_spec(name) is None), "")
