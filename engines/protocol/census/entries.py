"""The census: what an engine computes with its weights and has after a request has ended.

Always true: each entry has exactly one treatment, so that nothing which old weights computed
reaches a token of new ones.  A kind of engine has its entries as a column; configuration, launch
and lifecycle carry the treatments out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any


class Treatment(StrEnum):
    """What is done about one entry.

    Attributes:
        CLEARED: a call clears it at every update of weights.
        NAMED: its key contains the run and the weight version.
        DISABLED: a variable that the engine is launched with switches it off.
        REFUSED: the option that adds it is refused, with the reason.
        RECOMPUTED: the engine derives it from the weights again, at each load or at each use.
    """

    CLEARED = "cleared"
    NAMED = "named"
    DISABLED = "disabled"
    REFUSED = "refused"
    RECOMPUTED = "recomputed"


class Sign(StrEnum):
    """What the sentinel sees of an entry that is stale.

    Attributes:
        PREFIX: tokens of a prompt come from a cache, or the log-probs after them are old.
        IMAGE: the log-probs after an image are old.
        COPY: new weights change no log-prob.
    """

    PREFIX = "prefix"
    IMAGE = "image"
    COPY = "copy"
    NONE = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """One entry of the census.

    Attributes:
        by: what carries the treatment out: a call, a variable, or the reason of a refusal.
        source: where the engine's source has it.
        options: the engine's options that add it or change it, as shell patterns, underscores for
            dashes.
        variable: of its environment, that switches it off at 0.
        is_of_encoder: only weights that compute embeddings of images or sounds change it.
        sign: what the sentinel sees of it.
    """

    name: str
    treatment: Treatment
    by: str
    source: str
    options: tuple[str, ...] = ()
    variable: str = ""
    is_of_encoder: bool = False
    sign: Sign = Sign.NONE

    def is_of(self, option: str) -> bool:
        """Whether the option adds or changes it."""
        return any(fnmatchcase(option, pattern) for pattern in self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """What one kind of engine has of its weights.

    Attributes:
        versions: of the engine, as far as the entries were read in its source.
        others: shell patterns of options that sound as if they add an entry, and do not.
    """

    caches: tuple[Cache, ...] = ()
    versions: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        """The variable that switches a cache off; empty if there is none."""
        return next((cache.variable for cache in self.caches if cache.variable), "")

    def variables(self, *, keeps_embeddings: bool) -> dict[str, str]:
        """What an engine is launched with, so that the caches that are to be off are off."""
        return {
            cache.variable: "0"
            for cache in self._treated(Treatment.DISABLED, keeps_embeddings=keeps_embeddings)
        }

    def refuse(
        self, options: Mapping[str, Any], env: Mapping[str, str], *, keeps_embeddings: bool
    ) -> None:
        """Refuse what would add a cache that can be neither cleared nor named.

        Args:
            options: of the engine, in one spelling.
            env: its whole environment.
            keeps_embeddings: no push changes what computes embeddings.

        Raises:
            ValueError: naming the option or the variable, and what to set in its place.
        """
        if whys := self.why_refused(options, keeps_embeddings=keeps_embeddings):
            raise ValueError("; ".join(whys))
        for cache in self._treated(Treatment.DISABLED, keeps_embeddings=keeps_embeddings):
            if (value := env.get(cache.variable)) != "0":
                raise ValueError(
                    f"{cache.variable} = {value}: {cache.by}; unset it{_instead(cache)}"
                )

    def why_refused(self, options: Mapping[str, Any], *, keeps_embeddings: bool) -> list[str]:
        """Why some of these options are refused; empty if none is."""
        refused = self._treated(Treatment.REFUSED, keeps_embeddings=keeps_embeddings)
        return [
            f"{option}: {cache.by}; leave it out{_instead(cache)}"
            for cache in refused
            for option, value in options.items()
            if cache.is_of(option) and is_on(value)
        ]

    def needs_names(self, options: Mapping[str, Any]) -> bool:
        """Whether only names separate prefixes of two versions, with these options.

        Args:
            options: of the engine, in one spelling.
        """
        return any(
            cache.treatment is Treatment.NAMED
            and cache.sign is Sign.PREFIX
            and any(cache.is_of(option) and is_on(options[option]) for option in options)
            for cache in self.caches
        )

    def _treated(self, treatment: Treatment, *, keeps_embeddings: bool) -> list[Cache]:
        return [
            cache
            for cache in self.caches
            if cache.treatment is treatment and not (cache.is_of_encoder and keeps_embeddings)
        ]

    def unproved(self, version: str, options: Iterable[str]) -> list[str]:
        """What of an engine the census does not know, in words.

        Args:
            version: of the engine; empty if it is not known yet.
            options: that it was given, in any spelling.
        """
        found = []
        if version and not any(_is_version(version, known) for known in self.versions):
            found.append(f"version {version} (read: {', '.join(self.versions)})")
        names = (option.lstrip("-").replace("-", "_") for option in options)
        return found + [f"option {name}" for name in names if not self._knows(name)]

    def _knows(self, option: str) -> bool:
        if not _MAY_ADD.search(option):
            return True
        return any(cache.is_of(option) for cache in self.caches) or any(
            fnmatchcase(option, pattern) for pattern in self.others
        )

    def suspects(self, sign: Sign, options: Iterable[str]) -> list[Cache]:
        """The likeliest entries with this sign: those that these options add, then the first."""
        given = [option.lstrip("-").replace("-", "_") for option in options]
        found = {
            cache: any(cache.is_of(option) for option in given)
            for cache in self.caches
            if cache.sign is sign
        }
        likely = [one for one, is_given in found.items() if is_given]
        likely += [
            one
            for one, is_given in found.items()
            if not is_given and one.treatment is not Treatment.REFUSED
        ]
        return likely[:_MOST_SUSPECTS]


EMPTY = Census()

_MOST_SUSPECTS = 3
_MAY_ADD = re.compile(
    "cache|kv_|_kv|prefix|radix|storage|store|embed|session|linker|connector|transfer|specul|draft|"
    "lora|quant|eplb|graph|offload|routed|weight_|_experts"
)
"""What the names of options have that may add something which depends on weights."""


def is_on(value: Any) -> bool:
    """Whether the value of an option, given or reported, switches something on."""
    return value not in (None, False, 0, "", "0", "off", "none", "None")


def namespace(run: str, version: int | str | None) -> str:
    """What names the prefixes that weights of this version computed in this run.

    Args:
        run: of one router or group alone, so that no store has its name from before.
    """
    return run if version is None else f"{run}:v{version}"


def _instead(cache: Cache) -> str:
    named = ", or name those tensors in weights.not_pushed"
    return named if cache.is_of_encoder else ""


def _is_version(version: str, known: str) -> bool:
    """``0.5.23.post1`` is one of 0.5.23, and 0.5.230 is not."""
    return re.match(rf"{re.escape(known)}(?!\d)", version) is not None
