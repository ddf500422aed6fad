"""References in the values of a configuration, by OmegaConf: ``${run_id}``, ``${oc.env:NAME}``.

Always true: whatever is in the values, nothing is raised: a reference that leads nowhere is a
mistake with its setting.  A value that came from the environment is in no mistake.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engines.protocol.plain_text import value_text
from rollout.config.mistakes import HIDDEN, is_secret
from rollout.core.errors import Mistake

MISSING = "???"
"""OmegaConf's value of a setting that another file or an override must give."""
_ENVIRONMENT = "oc.env:"
_NO_VARIABLE = re.compile(r"Environment variable '([^']*)' not found")
_NO_KEY = re.compile(r"Interpolation key '([^']*)' not found")
_NOTHING = object()
# A shorter value is a number or a word, and would be replaced in the middle of others.
_SHORTEST_SECRET = 6


@dataclass(frozen=True, slots=True)
class Resolved:
    """The values without references.

    Attributes:
        values: nested dicts and lists; a value whose reference leads nowhere is left out.
        mistakes: a mistake for each of those.
        from_environment: setting -> how its value is written, and the value.
    """

    values: dict[Any, Any]
    mistakes: list[Mistake] = field(default_factory=list)
    from_environment: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def mask(self, mistakes: list[Mistake]) -> list[Mistake]:
        """The mistakes, with each value of the environment as it is written in the file."""
        return [self._masked(mistake) for mistake in mistakes]

    def _masked(self, mistake: Mistake) -> Mistake:
        message, value = mistake.message, mistake.value
        for setting, (written, secret) in self.from_environment.items():
            shown, text = value_text(secret), str(secret)
            message = message.replace(f"{setting} = {shown}", f"{setting} = {written}")
            if len(text) >= _SHORTEST_SECRET:
                message = message.replace(shown, written).replace(text, written)
                value = HIDDEN if text in str(value) else value
            value = HIDDEN if setting == mistake.setting else value
        return replace(mistake, message=message, value=value)


def resolve(values: Mapping[Any, Any]) -> Resolved:
    """Follow all references.

    Args:
        values: nested mappings; a ``DictConfig`` may be the whole or a part of them.
    """
    resolved = Resolved({})
    try:
        _resolve(values, resolved)
    except RecursionError:
        resolved.values.clear()
        resolved.mistakes.append(Mistake("", None, "a part of the values is in itself"))
    return resolved


def _resolve(values: Mapping[Any, Any], resolved: Resolved) -> None:
    plain = _without_configs(values, "", resolved)
    if not _is_config(values) and any(map(_is_reference, _texts(plain))):
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        plain = _readable(plain, "", resolved)
        try:
            config = OmegaConf.create(plain, flags={"allow_objects": True})
        except OmegaConfBaseException as error:  # a key that is no text
            resolved.mistakes.append(_mistake("", "", error))
            return
        plain = _without_configs(config, "", resolved)
    resolved.values.update(plain)


def _readable(values: Any, setting: str, resolved: Resolved) -> Any:
    """Nested dicts without the texts that OmegaConf cannot parse."""
    if not isinstance(values, Mapping):
        return values
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    readable = {}
    for key, value in values.items():
        place = _below(setting, key)
        try:
            if isinstance(value, (str, list, tuple)):
                OmegaConf.create([value], flags={"allow_objects": True})
        except OmegaConfBaseException as error:
            resolved.mistakes.append(_mistake(place, str(value), error))
        else:
            readable[key] = _readable(value, place, resolved)
    return readable


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _texts(value)
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _texts(value)


def _is_reference(text: str) -> bool:
    return "${" in text or text == MISSING


def _is_config(values: Any) -> bool:
    """Whether values are OmegaConf's; it is imported if any are."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and bool(omegaconf.OmegaConf.is_config(values))


def _without_configs(values: Any, setting: str, resolved: Resolved) -> Any:
    """Dicts and lists in the place of OmegaConf's, with all references followed."""
    if _is_config(values):
        keys = values if isinstance(values, Mapping) else range(len(values))
        entries = {key: _entry(values, key, _below(setting, key), resolved) for key in keys}
        entries = {key: value for key, value in entries.items() if value is not _NOTHING}
        return entries if isinstance(values, Mapping) else list(entries.values())
    if isinstance(values, Mapping):
        return {
            key: _without_configs(value, _below(setting, key), resolved)
            for key, value in values.items()
        }
    if isinstance(values, (list, tuple)):
        return type(values)(
            [_without_configs(value, f"{setting}.{i}", resolved) for i, value in enumerate(values)]
        )
    return values


def _entry(config: Any, key: Any, setting: str, resolved: Resolved) -> Any:
    """The value of a key, or ``_NOTHING`` and a mistake."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    written = ""
    try:
        if OmegaConf.is_interpolation(config, key):
            unresolved: Any = OmegaConf.to_container(config, resolve=False)
            written = str(unresolved[key])
        value = config[key]
    except OmegaConfBaseException as error:
        resolved.mistakes.append(_mistake(setting, written, error))
        return _NOTHING
    if _ENVIRONMENT in written:
        resolved.from_environment[setting] = (written, value)
    return _without_configs(value, setting, resolved)


def _below(setting: str, key: Any) -> str:
    return f"{setting}.{key}" if setting else str(key)


def _mistake(setting: str, written: str, error: Exception) -> Mistake:
    shown = HIDDEN if is_secret(setting, written) else written or MISSING
    reason = _reason(setting, shown, str(error).partition("\n")[0])
    return Mistake(setting, shown, f"{setting} = {shown}: {reason}" if setting else reason)


def _reason(setting: str, shown: str, error: str) -> str:
    if shown == MISSING:
        return f"give it in a later file, or as {setting}=value"
    if found := _NO_VARIABLE.search(error):
        name = found[1]
        return (
            f"there is no environment variable {name}; set it, or write ${{oc.env:{name},default}}"
        )
    if shown == HIDDEN:  # the error may show a part of it
        return "a ${...} in it leads nowhere; a text that is no reference is \\${...}"
    if found := _NO_KEY.search(error):
        return (
            f"there is no setting {found[1]}; an environment variable is ${{oc.env:{found[1]}}}, "
            f"and a text that is no reference \\${{{found[1]}}}"
        )
    return error
