"""Merges metrics pages in Prometheus' text format, and adds labels to the samples of each.

Always true: a metric family appears once, with all its samples together; a line that cannot be
parsed is left out without effect on others.  It works on text, because parsing the metrics of many
engines into objects would take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{.*\})?(\s+\S+(?:\s+\S+)?)\s*$")
_SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")


def merge_metrics(pages: Iterable[tuple[Mapping[str, str], str]]) -> str:
    """One page from all ``(labels, text)``; the first help and type of a family are kept."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for labels, text in pages:
        _take(text, _rendered(labels), heads, samples)
    lines: list[str] = []
    for family, of_family in samples.items():
        lines += heads.get(family, ())
        lines += of_family
    return "\n".join(lines) + "\n" if lines else ""


def _take(text: str, more: str, heads: dict[str, list[str]], samples: dict[str, list[str]]) -> None:
    families: set[str] = set()
    for line in text.splitlines():
        if line.startswith("#"):
            parts = line.split(None, 3)
            if len(parts) < 4 or parts[1] not in ("HELP", "TYPE"):
                continue
            family = parts[2]
            families.add(family)
            head = heads.setdefault(family, [])
            if not any(known.split(None, 2)[1] == parts[1] for known in head):
                head.append(line)
            continue
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, given, value = match.groups()
        inner = ",".join(part for part in ((given or "{}")[1:-1].strip(","), more) if part)
        labelled = f"{name}{{{inner}}}" if inner else name
        samples.setdefault(_family(name, families), []).append(f"{labelled}{value.rstrip()}")


def _family(name: str, families: set[str]) -> str:
    if name in families:
        return name
    for suffix in _SUFFIXES:
        base = name.removesuffix(suffix)
        if base != name and base in families:
            return base
    return name


def _rendered(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items())
