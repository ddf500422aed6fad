"""What a mismatch of log-probs looks like: where its tokens come from, and how they differ.

It is found in two steps.  First, which engines and weight versions have tokens that are off: those
whose average gap is over the limit, or over a tenth of the limit and over four times that of the
best engine of the same version.  So one wrong engine is found below the limit, too.  Weight
versions are not compared with each other: an older one differs legitimately.  Then, how these
tokens are off: as if one side were shifted by a token, or at another temperature, or otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import mul

from rollout.driver.logprobs.gap_figures import GapSums, total

Place = tuple[str, str]
"""An engine id and a weight version."""

# Averages of fewer tokens say little; they are used only if there are no others.
_FEW_TOKENS = 32
_FLOOR_SHARE = 0.1
_OUTLIER_FACTOR = 4.0
# The same tokens at two temperatures lie near a line, whose slope explains a part of the gaps: all
# of them in flat distributions, a quarter in steep ones.  That of other weights explains nothing.
_LEAST_CORRELATION = 0.9
_LEAST_SLOPE_CHANGE = 0.05
_MOST_UNEXPLAINED = 0.85


class GapCause(StrEnum):
    """What a mismatch looks like.

    ``not_finite``: an engine or the trainer gave NaN or an infinite log-prob.  ``shift``: one side
    is a token ahead.  ``temperature``: one side is at another temperature.  ``engine``: older
    weights or a damaged tensor in some engines.  ``version``: all engines differ, but only with
    some weight versions.  ``everywhere``: all tokens differ.
    """

    NOT_FINITE = "not_finite"
    SHIFT = "shift"
    TEMPERATURE = "temperature"
    ENGINE = "engine"
    VERSION = "version"
    EVERYWHERE = "everywhere"


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A mismatch that was found.

    Attributes:
        why: in words, with engine, weight version and gap.
        engine_id, weight_version: the only ones that are off; empty if there are several, or if it
            is not known.
        gap: average absolute gap of the tokens that are off, in nats.
        temperature: for the cause ``temperature``, roughly that of the engine's log-probs.
    """

    cause: GapCause
    why: str
    engine_id: str = ""
    weight_version: str = ""
    gap: float = 0.0
    temperature: float | None = None


_SHIFT = "It looks like a shift: one side is a token ahead of the other"
_TEMPERATURE = (
    "It looks like the temperature: the trainer's are at {trainer:g}, the engine's at about "
    "{engine:.2g} or further away"
)
_WORDS = {
    GapCause.ENGINE: "It looks like the engine: it has older weights or a damaged tensor",
    GapCause.VERSION: "It looks like the weight version: other versions agree with the trainer",
    GapCause.EVERYWHERE: "It looks like the trainer or the push: all tokens are off, so the model "
    "that computed the trainer's log-probs is not the one that was pushed",
}


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probs of the same tokens, in the order of the output: the engine's and the trainer's."""

    engine: Sequence[float]
    trainer: Sequence[float]


def find_mismatch(
    sums: Mapping[Place, GapSums],
    rows_of: Callable[[set[Place]], Sequence[LogprobRows]],
    *,
    limit: float,
    temperature: float,
) -> Mismatch | None:
    """What is wrong, if anything.

    Args:
        rows_of: the log-probs of all tokens of some places.
        temperature: of the trainer's log-probs.
    """
    if broken := {place for place, one in sums.items() if one.num_not_finite}:
        num = total(sums[place] for place in broken).num_not_finite
        return _mismatch(GapCause.NOT_FINITE, sums, broken, f"{num} log-probs are not finite")
    off = places_off(sums, limit)
    if not off:
        return None
    rows = rows_of(off)
    if is_shifted(rows, total(sums[place] for place in off).figures().mean):
        return _mismatch(GapCause.SHIFT, sums, off, _SHIFT)
    if ratio := temperature_ratio(rows):
        words = _TEMPERATURE.format(engine=temperature / ratio, trainer=temperature)
        found = _mismatch(GapCause.TEMPERATURE, sums, off, words)
        return replace(found, temperature=temperature / ratio)
    cause = place_cause(off, set(sums))
    return _mismatch(cause, sums, off, _WORDS[cause])


def _mismatch(
    cause: GapCause, sums: Mapping[Place, GapSums], off: set[Place], words: str
) -> Mismatch:
    engines, versions = ({place[part] for place in off} for part in (0, 1))
    mine = total(sums[place] for place in off).figures()
    others = total(one for place, one in sums.items() if place not in off).figures()
    rest = f", {others.mean:.2g} for the other {others.num_tokens}" if others.num_tokens else ""
    places = f"{_names('engine', engines)} with {_names('weight version', versions)}"
    return Mismatch(
        cause,
        f"log-probs of {places} differ from the trainer's by {mine.mean:.3g} nats on average, "
        f"{mine.largest:.3g} at most, over {mine.num_tokens} tokens{rest}. {words}",
        engine_id=engines.pop() if len(engines) == 1 else "",
        weight_version=versions.pop() if len(versions) == 1 else "",
        gap=mine.mean,
    )


def _names(kind: str, names: set[str]) -> str:
    words = [name or "unknown" for name in sorted(names)]
    return f"{kind} {words[0]}" if len(words) == 1 else f"{len(words)} {kind}s ({', '.join(words)})"


def places_off(sums: Mapping[Place, GapSums], limit: float) -> set[Place]:
    """The places whose tokens are off."""
    means = _means(sums)
    best: dict[str, float] = {}
    for (_, version), mean in means.items():
        best[version] = min(mean, best.get(version, math.inf))
    return {
        (engine_id, version)
        for (engine_id, version), mean in means.items()
        if mean > limit or mean > max(_FLOOR_SHARE * limit, _OUTLIER_FACTOR * best[version])
    }


def place_cause(off: set[Place], places: set[Place]) -> GapCause:
    """Whether weight versions, engines or neither separate the places that are off."""
    fine = places - off
    if fine and {version for _, version in off}.isdisjoint(version for _, version in fine):
        return GapCause.VERSION
    if fine and {engine_id for engine_id, _ in off}.isdisjoint(engine_id for engine_id, _ in fine):
        return GapCause.ENGINE
    return GapCause.EVERYWHERE


def is_shifted(rows: Sequence[LogprobRows], mean: float) -> bool:
    """Whether the log-probs agree if one side is moved by a token; ``mean`` is their gap now."""
    for at in (0, 1):
        gaps = [
            abs(theirs - ours)
            for row in rows
            for theirs, ours in zip(row.trainer[at:], row.engine[1 - at :], strict=False)
        ]
        if gaps and sum(gaps) / len(gaps) < mean / _OUTLIER_FACTOR:
            return True
    return False


def temperature_ratio(rows: Sequence[LogprobRows]) -> float | None:
    """The trainer's temperature divided by the engine's, roughly; None if they do not differ.

    It is the slope of a line through the pairs of log-probs: too close to 1 where distributions
    are steep.
    """
    ours = [value for row in rows for value in row.engine]
    theirs = [value for row in rows for value in row.trainer]
    if len(ours) < _FEW_TOKENS:
        return None
    of_theirs, of_ours, of_both = _variances(theirs, ours)
    of_gaps = of_theirs + of_ours - 2 * of_both
    if not (of_theirs > 0 and of_ours > 0 and of_gaps > 0):
        return None
    slope = of_both / of_theirs
    unexplained = max(0.0, of_ours - slope * of_both)
    is_line = (
        of_both / math.sqrt(of_theirs * of_ours) >= _LEAST_CORRELATION
        and math.sqrt(unexplained / of_gaps) <= _MOST_UNEXPLAINED
    )
    return slope if is_line and abs(slope - 1) >= _LEAST_SLOPE_CHANGE else None


def _variances(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """The variances of both, and their covariance; zeros for no values."""
    num = max(1, len(first))
    one, two = sum(first) / num, sum(second) / num
    return (
        sum(map(mul, first, first)) / num - one * one,
        sum(map(mul, second, second)) / num - two * two,
        sum(map(mul, first, second)) / num - one * two,
    )


def _means(sums: Mapping[Place, GapSums]) -> dict[Place, float]:
    means = {place: one.absolute / one.num for place, one in sums.items() if one.num}
    many = {place: mean for place, mean in means.items() if sums[place].num >= _FEW_TOKENS}
    return many or means
