"""What a mismatch of log-probs looks like: where its tokens come from, and how they differ.

It is found in two steps.  First, which engines and weight versions have tokens that are off: those
whose average gap is over the limit, or over a tenth of the limit and far from that of the best
engine of the same version.  So one wrong engine is found below the limit, too.  Of engines that are
off alike, all are: that one of them is over the limit and another is not is chance.  Weight
versions are not compared with each other: an older one differs legitimately.  Then, why these
tokens are off: the kind of their log-probs says it, or they look as if one side were shifted by a
token, or at another temperature, or otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import mul

from engines.protocol.logprob_kind import LogprobKind
from rollout.driver.logprobs.gap_figures import Cell, GapFigures, GapSums, summed, total

Place = tuple[str, str]
"""An engine id and a weight version."""

# Averages of fewer tokens say little; they are used only if there are no others.
_FEW_TOKENS = 32
_FLOOR_SHARE = 0.1
# An average is far from another if it is over four times as large, less three standard errors:
# most gaps are small and a few are large, so averages of few tokens differ by chance.
_OUTLIER_FACTOR = 4.0
_STANDARD_ERRORS = 3.0
# Positions 1 to 7 of an output, and those from 32 on.
_EARLY, _LATE = 4, 32
# Measured on a random model, the largest gap over the average: 6 with bfloat16, 7 with float16, and
# 18 to 80 after a training step, which moves a few tokens far.
_MOST_ROUNDED = 12.0
# The same tokens at two temperatures lie near a line, whose slope explains a part of the gaps: all
# of them in flat distributions, a quarter in steep ones.  That of other weights explains nothing.
_LEAST_CORRELATION = 0.9
_LEAST_SLOPE_CHANGE = 0.05
_MOST_UNEXPLAINED = 0.85


class GapCause(StrEnum):
    """What a mismatch looks like.

    ``not_finite``: an engine or the trainer gave NaN or an infinite log-prob.  ``cut``: those of
    the engine are behind top-p, top-k, min-p or penalties.  ``shift``: one side
    is a token ahead.  ``temperature``: one side is at another temperature.  ``rope``: the gap grows
    with the position.  ``dtype``: one side computes in a narrower type.  ``engine``: older weights
    or a damaged tensor in some engines.  ``version``: all engines differ, but only with some weight
    versions.  ``everywhere``: all tokens differ.
    """

    NOT_FINITE = "not_finite"
    CUT = "cut"
    SHIFT = "shift"
    TEMPERATURE = "temperature"
    ROPE = "rope"
    DTYPE = "dtype"
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


ROUNDING = {"bfloat16": 0.05, "float16": 0.01, "float32": 0.001}
"""Nats that an average gap may have between kernels that compute in this type.  Measured: 0.01 to
0.03 with bfloat16, 0.003 with float16, 1e-6 with float32."""

_CUT = (
    "The engine's are not log-softmax(logits / temperature): its replies say that they are behind "
    "top-p, top-k, min-p or penalties (logprob_kind is cut). Leave these out, or compute the "
    "trainer's with the same cuts, before you look for wrong weights"
)
_RAW = (
    "The engine's are at temperature 1, as its replies say (logprob_kind is raw), the trainer's at "
    "{trainer:g}: compare at temperature 1"
)
_SHIFT = "It looks like a shift: one side is a token ahead of the other"
_TEMPERATURE = (
    "It looks like the temperature: the trainer's are at {trainer:g}, the engine's at about "
    "{engine:.2g} or further away"
)
_WORDS = {
    GapCause.ROPE: "It looks like the positions: the gap grows with the position, as with another "
    "base or scaling of rope on one side",
    GapCause.DTYPE: "It looks like rounding: no token is far off, as with bfloat16 or float16 on "
    "one side only",
    GapCause.ENGINE: "It looks like the engine: it has older weights or a damaged tensor",
    GapCause.VERSION: "It looks like the weight version: other versions agree with the trainer",
    GapCause.EVERYWHERE: "It looks like the trainer or the push: all tokens are off, so the model "
    "that computed the trainer's log-probs is not the one that was pushed",
}


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probs of the same tokens, in the order of the output: the engine's and the trainer's.

    Attributes:
        kind: of the engine's; None if it is not known.
    """

    engine: Sequence[float]
    trainer: Sequence[float]
    kind: LogprobKind | None = None


def find_mismatch(
    cells: Mapping[Cell, GapSums],
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
    sums = summed(cells, place_of)
    if broken := {place for place, one in sums.items() if one.num_not_finite}:
        return _not_finite(sums, broken, rows_of(broken))
    off = places_off(sums, limit)
    if not off:
        return None
    rows = rows_of(off)
    if (kind := kind_that_is_off(rows)) is LogprobKind.CUT:
        return _mismatch(GapCause.CUT, sums, off, _CUT)
    if kind is LogprobKind.RAW and temperature != 1.0:
        found = _mismatch(GapCause.TEMPERATURE, sums, off, _RAW.format(trainer=temperature))
        return replace(found, temperature=1.0)
    figures = total(sums[place] for place in off).figures()
    if is_shifted(rows, figures.mean):
        return _mismatch(GapCause.SHIFT, sums, off, _SHIFT)
    if ratio := temperature_ratio(rows):
        words = _TEMPERATURE.format(engine=temperature / ratio, trainer=temperature)
        found = _mismatch(GapCause.TEMPERATURE, sums, off, words)
        return replace(found, temperature=temperature / ratio)
    if grows({cell: one for cell, one in cells.items() if place_of(cell) in off}):
        cause = GapCause.ROPE
    elif is_rounded(figures):
        cause = GapCause.DTYPE
    else:
        cause = place_cause(off, sums)
    return _mismatch(cause, sums, off, _WORDS[cause])


def kind_that_is_off(rows: Sequence[LogprobRows]) -> LogprobKind | None:
    """The kind of the rows with most of the gap, if that is not the full distribution."""
    gaps: dict[LogprobKind | None, float] = {}
    for row in rows:
        gap = sum(abs(theirs - ours) for theirs, ours in zip(row.trainer, row.engine, strict=True))
        gaps[row.kind] = gaps.get(row.kind, 0.0) + gap
    kind = max(gaps, key=gaps.__getitem__, default=None)
    return None if kind is LogprobKind.FULL else kind


def _not_finite(
    sums: Mapping[Place, GapSums], broken: set[Place], rows: Sequence[LogprobRows]
) -> Mismatch:
    """Whose log-probs are not finite; an engine is named only if its own are not."""
    num = total(sums[place] for place in broken).num_not_finite
    sides = [
        side
        for side, values in (
            ("the engine's", (value for row in rows for value in row.engine)),
            ("the trainer's", (value for row in rows for value in row.trainer)),
        )
        if not all(map(math.isfinite, values))
    ]
    words = f"{num} log-probs are not finite: {' and '.join(sides)}"
    found = _mismatch(GapCause.NOT_FINITE, sums, broken, words)
    return found if "the engine's" in sides else replace(found, engine_id="")


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


def place_of(cell: Cell) -> Place:
    """Engine and weight version of some tokens."""
    return cell.engine_id, cell.weight_version


def places_off(sums: Mapping[Place, GapSums], limit: float) -> set[Place]:
    """The places whose tokens are off."""
    known = _with_averages(sums)
    off: set[Place] = set()
    for version in {version for _, version in known}:
        means = {place: known[place].mean for place in known if place[1] == version}
        best = min(means.values())
        far = {
            place
            for place, mean in means.items()
            if mean > _FLOOR_SHARE * limit and is_far(known[place], best)
        }
        alike = means.keys() - far
        off |= far
        if max(means[place] for place in alike) > limit:
            off |= alike
    return off


def is_far(one: GapSums, mean: float) -> bool:
    """Whether its average gap is far above another average."""
    variance = max(0.0, one.squared / one.num - one.mean**2)
    error = math.sqrt(variance / one.num)
    return one.mean - _STANDARD_ERRORS * error > _OUTLIER_FACTOR * mean


def place_cause(off: set[Place], sums: Mapping[Place, GapSums]) -> GapCause:
    """Whether weight versions, engines or neither separate the places that are off."""
    fine = sums.keys() - off
    if not fine:
        return GapCause.EVERYWHERE
    if {version for _, version in off}.isdisjoint(version for _, version in fine):
        others = total(sums[place] for place in fine)
        is_of_version = is_far(total(sums[place] for place in off), others.mean)
        return GapCause.VERSION if is_of_version else GapCause.EVERYWHERE
    if {engine_id for engine_id, _ in off}.isdisjoint(engine_id for engine_id, _ in fine):
        return GapCause.ENGINE
    return GapCause.EVERYWHERE


def grows(cells: Mapping[Cell, GapSums]) -> bool:
    """Whether late tokens of the outputs are far more off than early ones."""
    early = total(one for cell, one in cells.items() if cell.position <= _EARLY)
    late = total(one for cell, one in cells.items() if cell.position >= _LATE)
    return min(early.num, late.num) >= _FEW_TOKENS and is_far(late, early.mean)


def is_rounded(figures: GapFigures) -> bool:
    """Whether gaps are of the size of rounding, without a token that is far off."""
    most = max(ROUNDING.values())
    return figures.mean <= most and figures.largest <= _MOST_ROUNDED * figures.mean


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


def _with_averages(sums: Mapping[Place, GapSums]) -> Mapping[Place, GapSums]:
    """Those with tokens; only those with many, if there are any."""
    known = {place: one for place, one in sums.items() if one.num}
    return {place: one for place, one in known.items() if one.num >= _FEW_TOKENS} or known
