"""Which weights a request names with ``lora_path``, and the version of what they reply (pure).

On a server that takes LoRA adapters, ``null`` names the base; without ``lora_path`` the router adds
the name of the adapter that was pushed last.  An engine has one version, that of its last push, and
reports it in every reply.  The base under an adapter has an older one, which its replies get here.

Always true: a body without the text ``"lora_path"`` is not parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.router.http.fast_json import loads
from rollout.router.http.routes import GENERATE_PATH, NAMING_PATHS, TOKENIZER_PATHS

FIELD = "lora_path"
_KEY = b'"lora_path"'
_OF_BASE = (None, "")


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """What a request says about its weights.

    Attributes:
        is_named: it names them, or needs none.
        of_base: whether the base answers, for each prompt; one entry if it is the same for all.
        num_each: completions of each prompt.
        is_streamed: its client wants events.
        problem: why the request cannot be answered; empty if it can.
    """

    is_named: bool = True
    of_base: tuple[bool, ...] = ()
    num_each: int = 1
    is_streamed: bool = False
    problem: str = ""

    @property
    def has_base(self) -> bool:
        """The base answers one of its prompts."""
        return any(self.of_base)

    @property
    def is_for_base(self) -> bool:
        """The base answers all of it."""
        return self.has_base and all(self.of_base)

    def stamped(self, payload: Any, base_version: int | None) -> Any:
        """A reply or an event, in which the base's tokens have the base's version.

        Raises what ``core.UNUSABLE`` has: it has another form.
        """
        items = payload if isinstance(payload, list) else [payload]
        for place, item in enumerate(items):
            prompt = item.get("index", place) // self.num_each
            if self.of_base[prompt] if len(self.of_base) > 1 else self.is_for_base:
                _stamp(item, str(base_version))
        return payload


NOT_NAMED = NamedWeights(is_named=False)
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
    if _KEY not in body:
        return NOT_NAMED
    if len(body) > max_bytes:
        return NamedWeights(problem=f"a body with {FIELD} has at most {max_bytes} bytes")
    try:
        raw = loads(body)
    except ValueError:
        return _NEEDS_NONE  # the engine refuses it
    if not isinstance(raw, dict) or FIELD not in raw:
        return NOT_NAMED
    named = raw[FIELD]
    names = named if isinstance(named, list) else [named]
    of_base = tuple(name in _OF_BASE for name in names)
    if len(set(of_base)) == 1:
        of_base = of_base[:1]
    problem = "" if path == GENERATE_PATH else _problem_of_openai(path, raw, of_base)
    return NamedWeights(True, of_base, _num_each(raw), bool(raw.get("stream")), problem)


def _problem_of_openai(path: str, raw: Mapping[str, Any], of_base: tuple[bool, ...]) -> str:
    if len(of_base) > 1:
        return (
            f"a reply of {path} has one weight version, so {FIELD} cannot name the base and an "
            f"adapter; send two requests, or {GENERATE_PATH}"
        )
    model = raw.get("model")
    if any(of_base) and isinstance(model, str) and ":" in model:
        return (
            f"model {model!r:.80} may name an adapter, after the colon, and {FIELD} names the "
            "base; send a model without a colon"
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


def _stamp(item: Mapping[str, Any], version: str) -> None:
    """Write the version where SGLang has it: in a reply of its own, or of OpenAI's form."""
    choices = item.get("choices") or ()
    places = [item.get("meta_info"), item.get("metadata")]
    places += [choice.get("meta_info") for choice in choices]
    for place in places:
        if isinstance(place, dict) and "weight_version" in place:
            place["weight_version"] = version
            for span in place.get("weight_versions") or ():
                span["version"] = version
