"""Which engines and weight versions have log-probs that are not the trainer's.

Always true: it reports facts of the tokens that are off: their places, gaps and kinds of log-probs,
and on which side a value is not finite.  Where the kind is not known, it names the sampling
parameters that leave such gaps; it does not guess anything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engines.protocol.logprob_kind import LogprobKind
from rollout.driver.logprobs.gap_figures import Cell, GapSums, summed, total
from rollout.driver.logprobs.gap_shapes import TokenGap, shape_of

Place = tuple[str, str]
"""An engine id and a weight version."""

ROUNDING = {"bfloat16": 0.05, "float16": 0.01, "float32": 0.001}
"""Nats that an average gap may have between kernels that compute in this type.  Measured: 0.01 to
0.03 with bfloat16, 0.003 with float16, 1e-6 with float32."""

_OF_KIND = {
    LogprobKind.PENALISED: "of logits that penalties, logit_bias, a grammar or min_new_tokens "
    "changed (logprob_kind is penalised): leave these out before you look for wrong weights",
    LogprobKind.CUT: "behind top-p, top-k or min-p (logprob_kind is cut): leave these out, or "
    "compute the trainer's with the same cuts, before you look for wrong weights",
    LogprobKind.RAW: "at temperature 1 (logprob_kind is raw): compare at temperature 1",
}


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Tokens whose log-probs are not the trainer's.

    Attributes:
        why: in words, with engines, weight versions and gap.
        engine_id, weight_version: the only ones that are off, or empty if there are several, or if
            it is not known.
        gap: average absolute gap of the tokens that are off, in nats.
    """

    why: str
    engine_id: str = ""
    weight_version: str = ""
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log-probs of the same tokens, in the order of the output: the engine's and the trainer's.

    Attributes:
        kind: of the engine's, or None if it is not known.
        gaps: of each token, where the kind is not known.
    """

    engine: Sequence[float]
    trainer: Sequence[float]
    kind: LogprobKind | None = None
    gaps: Sequence[TokenGap] = ()


def find_mismatch(
    cells: Mapping[Cell, GapSums],
    rows_of: Callable[[set[Place]], Sequence[LogprobRows]],
    *,
    limit: float,
    temperature: float,
) -> Mismatch | None:
    """The places whose average gap is over ``limit``, or with a log-prob that is not finite.

    Args:
        rows_of: the log-probs of all tokens of some places.
        temperature: of the trainer's log-probs.
    """
    sums = summed(cells, lambda cell: (cell.engine_id, cell.weight_version))
    off = {place for place, gaps in sums.items() if gaps.num_not_finite}
    is_of_engine = True
    if off:
        rows = rows_of(off)
        sides = {
            "the engine's": not all(math.isfinite(value) for row in rows for value in row.engine),
            "the trainer's": not all(math.isfinite(value) for row in rows for value in row.trainer),
        }
        is_of_engine = sides["the engine's"]
        num = total(sums[place] for place in off).num_not_finite
        names = " and ".join(side for side, is_side in sides.items() if is_side)
        fact = f"{num} log-probs are not finite: {names}"
    else:
        off = {place for place, gaps in sums.items() if gaps.mean > limit}
        if not off:
            return None
        rows = rows_of(off)
        kinds = {row.kind for row in rows}
        facts = [
            f"Log-probs of these engines are {words}"
            for kind, words in _OF_KIND.items()
            if kind in kinds and not (kind is LogprobKind.RAW and temperature == 1.0)
        ]
        if shape := shape_of((gap for row in rows for gap in row.gaps), limit):
            facts.append(f"{shape}: compare samples without them before you look for wrong weights")
        fact = ". ".join(facts) or f"The limit is {limit:g}"
    engines, versions = ({place[part] for place in off} for part in (0, 1))
    mine = total(sums[place] for place in off).figures()
    others = total(gaps for place, gaps in sums.items() if place not in off).figures()
    rest = f", {others.mean:.2g} for the other {others.num_tokens}" if others.num_tokens else ""
    places = f"{_names('engine', engines)} with {_names('weight version', versions)}"
    return Mismatch(
        f"log-probs of {places} differ from the trainer's by {mine.mean:.3g} nats on average, "
        f"{mine.largest:.3g} at most, over {mine.num_tokens} tokens{rest}. {fact}",
        # No engine is to blame for what the trainer computes.
        engine_id=engines.pop() if len(engines) == 1 and is_of_engine else "",
        weight_version=versions.pop() if len(versions) == 1 else "",
        gap=mine.mean,
    )


def _names(kind: str, names: set[str]) -> str:
    words = [name or "unknown" for name in sorted(names)]
    return f"{kind} {words[0]}" if len(words) == 1 else f"{len(words)} {kind}s ({', '.join(words)})"
