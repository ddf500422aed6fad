"""Which weights a request names with ``lora_path``, and the version of what they reply (pure).

On a server that takes LoRA adapters, ``null`` names the base, and a request without ``lora_path``
gets the first of ``weights.adapters``.  Engines have a name for each version of an adapter, which
the router writes behind the client's.  An engine reports the version of its base; a reply of an
adapter gets the adapter's here, unless the base under it is newer.

Always true: a body without the text ``"lora_path"`` or ``"stream"`` is not parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engines.protocol.adapter_names import UNNAMED, Names, version_of
from rollout.router.http.fast_json import dumps, loads
from rollout.router.http.routes import GENERATE_PATH, NAMING_PATHS, TOKENIZER_PATHS

FIELD = "lora_path"
MAX_NAME_CHARACTERS = 256
"""A session keeps the name of its weights."""
_KEY, _STREAM = b'"lora_path"', b'"stream"'


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """What a request says about its weights.

    Attributes:
        names: one for each prompt; one entry if it is the same for all.
        num_each: completions of each prompt.
        is_streamed: its client wants events.
        problem: why the request cannot be answered, or empty if it can.
    """

    names: Names = (None,)
    num_each: int = 1
    is_streamed: bool = False
    problem: str = ""

    @property
    def is_for_base(self) -> bool:
        """The base answers all of it."""
        return set(self.names) == {None}

    def member(self, names: Names) -> bytes:
        """What the body needs behind its members, so that engines read these names."""
        if names == (self.names if self.names != UNNAMED else (None,)):
            return b""
        return dumps({FIELD: list(names) if len(names) > 1 else names[0]})[1:-1]

    def stamped(self, payload: Any) -> Any:
        """A reply or an event, in which the tokens of adapters have the versions of those.

        Raises what ``core.UNUSABLE`` has: it has another form.
        """
        items = payload if isinstance(payload, list) else [payload]
        for place, item in enumerate(items):
            prompt = item.get("index", place) // self.num_each
            name = self.names[prompt] if len(self.names) > 1 else self.names[0]
            if version := version_of(name):
                _stamp(item, version)
        return payload


NOT_NAMED = NamedWeights(UNNAMED)
_NEEDS_NONE = NamedWeights()


def read_named(path: str, body: bytes, max_bytes: int) -> NamedWeights:
    """What this body says.

    Args:
        max_bytes: a longer body with a name is not read.
    """
    if path in TOKENIZER_PATHS:
        return _NEEDS_NONE
    if path not in NAMING_PATHS:
        return NamedWeights(
            problem=f"{path} takes no {FIELD}, so the base would answer instead of the adapter; "
            f"use {', '.join(sorted(NAMING_PATHS))}"
        )
    has_name = _KEY in body
    if has_name and len(body) > max_bytes:
        return NamedWeights(problem=f"a body with {FIELD} has at most {max_bytes} bytes")
    if not (has_name or _STREAM in body):
        return NOT_NAMED
    try:
        raw = loads(body)
    except ValueError:
        return _NEEDS_NONE  # the engine refuses it
    if not isinstance(raw, dict) or FIELD not in raw:
        return NamedWeights(UNNAMED, is_streamed=isinstance(raw, dict) and bool(raw.get("stream")))
    named = raw[FIELD]
    names = tuple(name or None for name in (named if isinstance(named, list) else [named]))
    if not names or not all(name is None or isinstance(name, str) for name in names):
        return _NEEDS_NONE  # the engine refuses it
    names = names[:1] if len(set(names)) == 1 else names
    if (longest := max(len(name or "") for name in names)) > MAX_NAME_CHARACTERS:
        problem = f"{FIELD} has {longest} characters, and at most {MAX_NAME_CHARACTERS}"
        return NamedWeights(problem=problem)
    problem = "" if path == GENERATE_PATH else _problem_of_openai(path, raw, names)
    return NamedWeights(names, _num_each(raw), bool(raw.get("stream")), problem)


def _problem_of_openai(path: str, raw: Mapping[str, Any], names: Names) -> str:
    if len(names) > 1:
        return (
            f"a reply of {path} has one weight version, so {FIELD} cannot name two; send two "
            f"requests, or {GENERATE_PATH}"
        )
    model = raw.get("model")
    if isinstance(model, str) and ":" in model:
        return (
            f"model {model!r:.80} may name an adapter, after the colon, and {FIELD} names "
            f"{names[0] or 'the base'}; send a model without a colon"
        )
    return ""


def _num_each(raw: Mapping[str, Any]) -> int:
    """How many replies of ``/generate`` belong to one prompt; beams are one reply."""
    sampling = raw.get("sampling_params")
    if isinstance(sampling, list):
        sampling = sampling[0] if sampling else None
    if not isinstance(sampling, dict) or sampling.get("beam_width") not in (None, 1):
        return 1
    num = sampling.get("n")
    return num if isinstance(num, int) and num > 0 else 1


def _stamp(item: Mapping[str, Any], version: int) -> None:
    """Write the version where SGLang has it: in a reply of its own, or of OpenAI's form."""
    choices = item.get("choices") or ()
    places = [item.get("meta_info"), item.get("metadata")]
    places += [choice.get("meta_info") for choice in choices]
    for place in places:
        if isinstance(place, dict) and "weight_version" in place:
            place["weight_version"] = _newer(place["weight_version"], version)
            for span in place.get("weight_versions") or ():
                span["version"] = _newer(span["version"], version)


def _newer(of_base: Any, version: int) -> str:
    """An adapter over a newer base is other weights than before, and has the base's version."""
    return str(max(version, int(of_base) if str(of_base).isdecimal() else 0))
