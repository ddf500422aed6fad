"""All mistakes in the values of a configuration, each with its path and what would be accepted.

Always true: a mistake that hides others does not: values are checked again without the wrong ones,
until nothing new is found.  Secrets are never shown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from engines.protocol.plain_text import value_text
from rollout.config.base import DOES_NOT_FIT
from rollout.core.errors import Mistake

M = TypeVar("M", bound=BaseModel)
HIDDEN = "(hidden)"
"""What is shown in the place of a secret."""
Location = tuple[int | str, ...]

_UNKNOWN = "extra_forbidden"
# Errors that appear only because a wrong value was taken out.
_OF_REMOVAL = ("missing", "too_short")
# Reported for a default that follows from settings, one of which is wrong and has its own error.
_FOLLOWS = "default_factory_not_called"
_LISTS = ("tuple_type", "list_type")
_NUMBERS = ("float_parsing", "int_parsing")
_UNITS: Mapping[str, Mapping[str, float]] = {
    "bytes": {"b": 1, "k": 2**10, "kib": 2**10, "m": 2**20, "mib": 2**20, "g": 2**30, "gib": 2**30}
    | {"kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "t": 2**40, "tib": 2**40},
    "seconds": {"ms": 1e-3, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400},
}
_SECTIONS = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_PATTERNS = {
    r"^[a-z][a-z0-9_]*$": "must be lower-case letters, digits and _, a letter first",
    r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$": (
        "must be at most 63 letters, digits, _, . and -, a letter or digit first"
    ),
    r"^[^\x00]*$": "must be the path of a file or folder",
}


_FIXED = "leave it out: it is fixed, and no longer a setting"
GONE: Mapping[str, str] = {
    **dict.fromkeys(
        ("control_timeout_s", "forget_after_s", "max_parallel_restarts", "probes_to_suspect"),
        _FIXED,
    ),
    "probes_to_trust": _FIXED,
    **dict.fromkeys(
        ("adapter_versions", "affinity_ttl_s", "failover_interval", "max_affinities"), _FIXED
    ),
    **dict.fromkeys(("max_failovers", "patience", "reports_to_dead", "write_timeout_s"), _FIXED),
    **dict.fromkeys(
        (f"{command}_timeout_s" for command in ("pause", "flush", "verify", "continue")),
        "set lifecycle.command_timeout_s",
    ),
    **dict.fromkeys(("release_timeout_s", "resume_timeout_s"), "set lifecycle.memory_timeout_s"),
    "lock_timeout_s": "leave it out: a command waits for the one before it as long as all "
    "deadlines of a push allow",
    "stop_timeout_s": _FIXED,
    **{
        f"router.{name}": f"set agents.{name}: sessions are served by a program of their own"
        for name in ("session_ttl_s", "max_sessions", "max_session_bytes", "tool_call_parser")
    },
    "page.enabled": "leave it out: each server has its page, on this machine alone unless "
    "page.host says otherwise",
    "strict_caches": "leave it out: after each push the sentinel asks each engine whether it "
    "answers from old state (verify.sentinel)",
    "lifecycle.verify_by": "set verify.by",
    "weights.fingerprint": "set verify.fingerprints",
    **{
        f"lifecycle.{name}": f"set verify.{name}"
        for name in ("canary_prompts", "canary_tolerance", "sentinel")
    },
}
"""A setting of before, by its name or with that of its section -> what to do now."""
RENAMED_VALUES: Mapping[tuple[str, str], str] = {("transport", "tensor"): "by_value"}
"""A setting and a value of before -> the value's name now."""


def examine(
    model: type[M], values: Any, known: Iterable[Mistake] = ()
) -> tuple[M | None, list[Mistake]]:
    """The configuration without its wrong values, if it can do without them, and all mistakes.

    Args:
        known: mistakes that have been taken out of the values; the first of those returned.
    """
    found = {wrong.setting: [wrong] for wrong in known}
    is_first = True
    while True:
        try:
            config = model.model_validate(values)
            return config, [wrong for wrongs in found.values() for wrong in wrongs]
        except ValidationError as error:
            errors = error.errors(include_url=False)
        causes = set(found) if is_first else {*found, *_settings_of_removal(errors)}
        new = [wrong for wrong in _mistakes(model, errors) if wrong.setting not in causes]
        is_first = False
        if not new:
            return None, [wrong for wrongs in found.values() for wrong in wrongs]
        for wrong in new:
            found.setdefault(wrong.setting, []).append(wrong)
        places = [(place, wrong) for wrong in errors for place in _places(wrong)]
        values = _repaired(values, {place: _meant(model, wrong) for place, wrong in places})


def _places(error: Mapping[str, Any]) -> Iterator[Location]:
    """What to take out: the wrong value, or its section if it is a default."""
    location, section = error["loc"], error["input"]
    if error["type"] != DOES_NOT_FIT:
        yield location
        return
    for name, _ in error["ctx"]["found"]:
        first, *rest = name.split(".")
        is_set = isinstance(section, Mapping) and first in section
        yield (*location, first, *rest) if is_set else location


def _settings_of_removal(errors: Iterable[Mapping[str, Any]]) -> set[str]:
    return {dotted(error["loc"]) for error in errors if error["type"] in _OF_REMOVAL}


def dotted(location: Location) -> str:
    """A place in the values as a path: ``servers.policy.model_path``."""
    return ".".join(str(part) for part in location if part != "[key]")


def _mistakes(model: type[BaseModel], errors: Iterable[Any]) -> Iterator[Mistake]:
    errors = (error for error in errors if error["type"] != _FOLLOWS)
    errors = sorted(errors, key=lambda error: error["type"] != _UNKNOWN)
    meant: set[str] = set()
    for error in errors:
        location, setting = error["loc"], dotted(error["loc"])
        if error["type"] == _UNKNOWN:
            meant.add(dotted((*location[:-1], _meant(model, error))))
            value = _shown_value(setting, error["input"])
            yield Mistake(setting, value, _unknown_key(model, location))
        elif error["type"] == DOES_NOT_FIT:
            for name, why in error["ctx"]["found"]:
                yield _conflict(location, name, why, error["input"])
        elif error["type"] == "missing":
            if setting not in meant:  # a mistyped key is the cause
                yield Mistake(setting, None, f"{setting} is missing{_choices(model, location)}")
        else:
            value = _shown_value(setting, error["input"])
            shown = f"{setting or 'config'} = {_short(value)}"
            yield Mistake(setting, value, f"{shown}: {_accepted(error)}")


def _choices(model: type[BaseModel], location: Location) -> str:
    """What a missing setting, or the first one that its section needs, may be."""
    *parents, key = (str(part) for part in location)
    annotation = _section_at(model, parents).model_fields[key].annotation
    section, is_named = _section_of(annotation)
    if section is not None and not is_named and (needed := _first_required(section)):
        return f"; it needs {needed}{_choices(section, (needed,))}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return f", one of {', '.join(annotation)}"
    return ""


def _first_required(section: type[BaseModel]) -> str:
    fields = section.model_fields.items()
    return next((name for name, field in fields if field.is_required()), "")


def _conflict(location: Location, name: str, why: str, section: Any) -> Mistake:
    setting, value = dotted((*location, name)), section
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    value = _shown_value(setting, value)
    return Mistake(setting, value, f"{setting} = {_short(value)}: {why}")


def _accepted(error: Mapping[str, Any]) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if now := RENAMED_VALUES.get((dotted(error["loc"][-1:]), str(error["input"]))):
        return f"it is called {now} now"
    if kind in _LISTS:
        return f"must be a list, such as [{_short(error['input']).strip(chr(39))}]"
    if kind in _SECTIONS:
        return "must be a section, with its settings indented below it"
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(context["pattern"], str(error["msg"]))
    if kind == "too_short":
        return "must have at least one entry"
    if kind in _NUMBERS and (number := _without_unit(dotted(error["loc"]), error["input"])):
        return f"must be a number without a unit, here {number}"
    return str(error["msg"])


def _without_unit(setting: str, value: str) -> str:
    """What a value such as ``4GiB`` or ``2m`` is in the setting's unit, or empty if it is none."""
    written = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]+)\s*", value)
    unit = "bytes" if setting.endswith("_bytes") else "seconds" if setting.endswith("_s") else ""
    size = _UNITS.get(unit, {}).get(written[2].lower()) if written else None
    return f"{float(written[1]) * size:.15g} {unit}" if written and size is not None else ""


def _shown_value(setting: str, value: Any) -> Any:
    return HIDDEN if is_secret(setting, value) else value


def is_secret(setting: str, value: Any) -> bool:
    """Whether a value may be a secret: a key, the environment, or a section that contains keys."""
    parts = setting.split(".")
    holds = isinstance(value, Mapping) and any(str(name).endswith("key") for name in value)
    is_key = parts[-1] == "key" or parts[-1].endswith("_key")
    return is_key or "env" in parts or holds or parts[-1] == "page"


def _short(value: Any) -> str:
    return HIDDEN if value == HIDDEN else value_text(value)


def _unknown_key(model: type[BaseModel], location: Location) -> str:
    *parents, key = (str(part) for part in location)
    if now := _now_of(parents, key):
        return f"{key!r} is gone; {now}"
    known = _section_at(model, parents).model_fields
    near = _nearest(key, known)
    hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
    if homes := _homes(model, parents, key):
        hint = f"it belongs in {' or '.join(homes[:3])}"
    return f"unknown key {key!r} in {'.'.join(parents) or 'the config'}; {hint}"


def _now_of(parents: list[str], key: str) -> str:
    """What to do instead of a setting that is gone, or empty if there never was one."""
    return GONE.get(".".join([*parents[-1:], key])) or GONE.get(key, "")


def _homes(model: type[BaseModel], parents: list[str], key: str) -> list[str]:
    """The sections that have this very key: those below its place, else all others."""
    below = _sections_with(_section_at(model, parents), ".".join(parents), key)
    return below or _sections_with(model, "", key)


def _sections_with(model: type[BaseModel], path: str, key: str) -> list[str]:
    """The sections below ``model`` that have this key; names that users choose are ``<name>``."""
    found = []
    for name, field in model.model_fields.items():
        section, is_named = _section_of(field.annotation)
        if section is not None:
            below = ".".join(filter(None, (path, name, "<name>" if is_named else "")))
            found += [below] if key in section.model_fields else []
            found += _sections_with(section, below, key)
    return found


def _section_of(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The section that a setting holds, if any, and whether under names that users choose."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    for part in get_args(annotation):
        section, _ = _section_of(part)
        if section is not None:
            return section, get_origin(annotation) is dict
    return None, False


def _meant(model: type[BaseModel], error: Mapping[str, Any]) -> str:
    """The key that an unknown key was probably meant to be, or empty if there is none."""
    *parents, key = (str(part) for part in error["loc"] or ("",))
    if error["type"] != _UNKNOWN or _now_of(parents, key) or _homes(model, parents, key):
        return ""
    return _nearest(key, _section_at(model, parents).model_fields)


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return near[0] if near else ""


def _section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel]:
    for part in path:
        field = model.model_fields.get(part)
        if field is not None:  # else a name chosen by the user: the key of a dict of sections
            model = _section_of(field.annotation)[0] or model
    return model


def _repaired(values: Any, wrong: Mapping[Location, str]) -> Any:
    """A copy of nested mappings without the values at these places.

    Args:
        wrong: place -> the key under which its value stays, if that is not taken; or empty.
    """
    if not isinstance(values, Mapping):
        return values
    kept: dict[Any, Any] = {}
    for name, value in values.items():
        below = {place[1:]: key for place, key in wrong.items() if place and place[0] == name}
        key = below.get((), name)
        if ("[key]",) not in below and key and (key == name or key not in values):
            kept[key] = _repaired(value, below)
    return kept
