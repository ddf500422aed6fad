"""From what pydantic says to the one thing that is wrong, in words."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from rollout.errors import ConfigError


def as_config_error(error: ValidationError, whole: type[BaseModel]) -> ConfigError:
    """What is wrong first, with its path in ``whole`` and what would be accepted."""
    # A mistyped key also shows as a missing one: the typo is the thing to say.
    first = min(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    location = first["loc"]
    setting = ".".join(str(part) for part in location if part != "[key]")
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        message = _unknown_key(location, whole)
    elif first["type"] == "missing":
        message = f"{setting} is missing"
    else:
        shown = "(hidden)" if _is_secret(setting, value) else repr(value)
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        message = f"{setting or 'config'} = {shown}: {first['msg']}"
    more = error.error_count() - 1
    if more:
        message += f" ({more} more wrong)"
    return ConfigError(message, setting=setting, value=value)


def _is_secret(setting: str, value: Any) -> bool:
    """Whether a value may hold a key: one itself, or a slice with keys in it."""
    last = setting.rpartition(".")[2]
    holds = isinstance(value, Mapping) and any(str(name).endswith("_key") for name in value)
    return last == "key" or last.endswith("_key") or last == "env" or holds or last == "page"


def _unknown_key(location: tuple[int | str, ...], whole: type[BaseModel]) -> str:
    *parents, key = (str(part) for part in location)
    known = list(_slice_at(parents, whole).model_fields)
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    where = ".".join(parents) or "the config"
    return f"unknown key {key!r} in {where}; {hint}"


def _slice_at(path: list[str], whole: type[BaseModel]) -> type[BaseModel]:
    model = whole
    for part in path:
        field = model.model_fields.get(part)
        if field is None:  # a name chosen by the user: the key of a dict of slices
            continue
        for candidate in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(candidate, type) and issubclass(candidate, BaseModel):
                model = candidate
    return model
