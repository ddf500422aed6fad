"""The log-probs of the engines compared with the trainer's, token by token.

Always true: nothing of numpy or torch is needed; tokens that no policy generated (mask 0) are left
out of every figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from typing import Any, Literal, NamedTuple

from pydantic import SkipValidation

from rollout.core.arguments import AboveZero, checked
from rollout.core.errors import LogprobMismatch
from rollout.core.samples import Sample, SampleGroup
from rollout.driver.logprobs.gap_figures import Cell, GapFigures, GapSums, ratios, summed, total
from rollout.driver.logprobs.gap_shapes import TokenGap, token_gaps
from rollout.driver.logprobs.mismatch import ROUNDING, LogprobRows, Mismatch, Place, find_mismatch
from rollout.driver.logprobs.ratio_bounds import (
    TIS_CAP,
    Level,
    RatioBounds,
    effective_share,
    log_ratio,
    truncated,
)

Dtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True)
class LogprobReport:
    """How far the trainer's log-probs are from the engines'.

    Attributes:
        overall: figures of all tokens.
        by_engine: by engine id, or empty where it is not known.
        by_version: by weight version, or empty where it is not known.
        by_position: by the token's place in its output: 1, 2 to 3, 4 to 7 ... by the first of each.
        gaps: one list for each sample: the trainer's log-prob of each output token less the
            engine's, in nats; 0.0 where the mask is 0.
        masks: one list for each sample, shaped as ``gaps``: 1 for a token of the policy.
        histograms: by engine id, the number of tokens up to each bound of the absolute gap, and
            their sum.
        mismatch: None if the log-probs agree.
    """

    overall: GapFigures
    by_engine: Mapping[str, GapFigures]
    by_version: Mapping[str, GapFigures]
    by_position: Mapping[int, GapFigures]
    gaps: Sequence[Sequence[float]]
    masks: Sequence[Sequence[int]]
    histograms: Mapping[str, Mapping[str, float]]
    mismatch: Mismatch | None

    @checked
    def truncated_weights(self, cap: AboveZero = TIS_CAP) -> list[list[float]]:
        """Truncated importance weights, shaped as ``gaps``: min(p_trainer / p_engine, cap).

        They correct a policy gradient for tokens that another policy than the trainer's has drawn:
        E. L. Ionides, "Truncated Importance Sampling" (2008); for rollout engines F. Yao et al.,
        "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025).
        A gap that is NaN gives the weight 0.

        Args:
            cap: the largest weight, over 0.

        Raises:
            TypeError, ValueError: ``cap`` is not over 0.
        """
        return [
            [0.0 if math.isnan(ratio) else min(ratio, cap) for ratio in ratios(row)]
            for row in self.gaps
        ]

    @checked
    def sequence_weights(self, cap: AboveZero = TIS_CAP, *, geometric: bool = False) -> list[float]:
        """One truncated importance weight for each sample: min(product of its ratios, cap).

        It corrects for the whole sequence that another policy has drawn: without a bias below the
        cap, with a variance that grows with the length.  ``rollout.importance_weights`` has the
        formulas with their sources, for tensors.  A gap that is NaN gives the weight 0.

        Args:
            cap: the largest weight, over 0.
            geometric: the geometric mean of the ratios, as in GSPO, instead of the product.

        Raises:
            ValueError: ``cap`` is not over 0.
        """
        return [
            truncated(log_ratio(row, mask, is_geometric=geometric), cap)
            for row, mask in zip(self.gaps, self.masks, strict=True)
        ]

    @checked
    def accepted(
        self,
        level: Level = "sequence",
        *,
        upper: AboveZero,
        lower: AboveZero | None = None,
        veto: AboveZero | None = None,
    ) -> list[list[bool]]:
        """The tokens that a rejection leaves in the loss, shaped as ``gaps``; False for mask 0.

        Args:
            level: which ratio is compared: the token's own, the product of the sequence's, or
                their geometric mean.
            upper, lower: tokens with lower <= ratio <= upper stay; ``lower`` is 1 / ``upper`` if
                it is None.
            veto: a sample with a token whose own ratio is below is left out as a whole.

        Raises:
            ValueError: ``lower`` is over ``upper``, or an argument is wrong.
        """
        bounds = RatioBounds(upper, lower, veto)
        return [
            bounds.accepted(row, mask, level)
            for row, mask in zip(self.gaps, self.masks, strict=True)
        ]

    def raise_mismatch(self) -> None:
        """Raise if there is a mismatch.

        Raises:
            LogprobMismatch: with its engine, weight version and gap.
        """
        found = self.mismatch
        if found is not None:
            raise LogprobMismatch(
                found.why,
                engine_id=found.engine_id,
                weight_version=found.weight_version,
                gap=found.gap,
            )

    def metrics(self) -> dict[str, float]:
        """Its figures under names for trackers; each is finite."""
        overall = self.overall
        figures = {
            "mean": overall.mean,
            "largest": overall.largest,
            "bias": overall.bias,
            "kl_k1": overall.kl_k1,
            "kl_k3": overall.kl_k3,
            "mean_ratio": overall.mean_ratio,
            "truncated_share": self._share_over(TIS_CAP),
            "effective_share": effective_share(
                [
                    truncated(gap, TIS_CAP)
                    for row, mask in zip(self.gaps, self.masks, strict=True)
                    for gap, flag in zip(row, mask, strict=True)
                    if flag
                ]
            ),
            "effective_sequences": effective_share(self.sequence_weights()),
            "num_tokens": overall.num_tokens,
            "num_not_finite": overall.num_not_finite,
            "is_mismatch": self.mismatch is not None,
            **{
                f"engine/{name or 'unknown'}": engine.mean
                for name, engine in self.by_engine.items()
            },
        }
        return {f"logprob_gap/{name}": float(value) for name, value in figures.items()}

    def _share_over(self, cap: float) -> float:
        limit = math.log(cap)
        return sum(gap > limit for row in self.gaps for gap in row) / max(
            1, self.overall.num_tokens
        )


@checked
def compare_logprobs(
    samples: SkipValidation[Sequence[Sample] | Sequence[SampleGroup]],
    trainer_logprobs: Any,
    *,
    temperature: AboveZero = 1.0,
    dtype: Dtype = "bfloat16",
    limit: AboveZero | None = None,
) -> LogprobReport:
    """Compare the log-probs of the engines with those of the trainer.

    Args:
        samples: samples, or groups of them.
        trainer_logprobs: for each sample, in order, the natural-log probability of each output
            token under the trainer's model: lists, or one-dimensional arrays or tensors.
        temperature: at which the trainer's were computed.  It has to be the engine's: the one of
            the sampling parameters, or 1 if the engine reports them without a temperature.  A
            mismatch says so if they are behind cuts or penalties: by ``logprob_kind`` or, where
            that is None, by the gaps.
        dtype: in which engine and trainer compute, the narrower of the two: sets the limit.
        limit: nats that the average gap of the tokens of one engine and weight version may have; by
            default what rounding costs: 0.05 for bfloat16, 0.01 for float16, 0.001 for float32.

    Raises:
        TypeError, ValueError: rows or tokens do not fit the samples, or a wrong setting.
    """
    flat = _flat(samples)
    rows = _rows(flat, trainer_logprobs)
    sums: dict[Cell, GapSums] = {}
    gaps = []
    for sample, row in zip(flat, rows, strict=True):
        gaps.append(of_sample := [0.0] * len(row))
        for piece in _pieces(sample):
            start, end = piece.start, piece.end
            of_sample[start:end] = map(sub, row[start:end], sample.output_logprobs[start:end])
            for cell, first, last in _cells(piece):
                sums.setdefault(cell, GapSums()).add(of_sample[first:last])
    limit = ROUNDING[dtype] if limit is None else limit
    masks = [sample.mask for sample in flat]
    return _report(sums, gaps, masks, _find(flat, rows, sums, temperature, limit))


class _Piece(NamedTuple):
    """Tokens of one sample from one engine and weight version, all of a policy."""

    place: Place
    start: int
    end: int


def _pieces(sample: Sample) -> Iterator[_Piece]:
    mask, length = sample.mask, len(sample.output_ids)
    cuts = {0, length}
    cuts.update(*((span.start, span.end) for span in sample.engines))
    cuts.update(*((span.start, span.end) for span in sample.weight_versions))
    if not all(mask):
        cuts.update(index for index in range(1, length) if mask[index] != mask[index - 1])
    for start, end in pairwise(sorted(cuts)):
        if mask[start]:
            engines = (span.engine_id for span in sample.engines if span.start <= start < span.end)
            versions = (span.version for span in sample.weight_versions if start < span.end)
            yield _Piece((next(engines, ""), next(versions, "")), start, end)


def _cells(piece: _Piece) -> Iterator[tuple[Cell, int, int]]:
    """The tokens of a piece by position."""
    start = piece.start
    while start < piece.end:
        position = 1 << (start + 1).bit_length() - 1
        end = min(piece.end, 2 * position - 1)
        yield Cell(*piece.place, position), start, end
        start = end


def _find(
    samples: Sequence[Sample],
    rows: Sequence[Sequence[float]],
    sums: Mapping[Cell, GapSums],
    temperature: float,
    limit: float,
) -> Mismatch | None:
    def rows_of(places: set[Place]) -> list[LogprobRows]:
        return [
            _of_piece(sample, row, piece)
            for sample, row in zip(samples, rows, strict=True)
            for piece in _pieces(sample)
            if piece.place in places
        ]

    return find_mismatch(sums, rows_of, limit=limit, temperature=temperature)


def _of_piece(sample: Sample, row: Sequence[float], piece: _Piece) -> LogprobRows:
    engine, trainer = sample.output_logprobs[piece.start : piece.end], row[piece.start : piece.end]
    gaps: Sequence[TokenGap] = ()
    if sample.logprob_kind is None:
        found = list(map(sub, trainer, engine))
        gaps = token_gaps(sample.prompt_ids, sample.output_ids, piece.start, found)
    return LogprobRows(engine, trainer, sample.logprob_kind, gaps)


def _report(
    sums: Mapping[Cell, GapSums],
    gaps: Sequence[Sequence[float]],
    masks: Sequence[Sequence[int]],
    mismatch: Mismatch | None,
) -> LogprobReport:
    engines = summed(sums, lambda cell: cell.engine_id)
    versions = summed(sums, lambda cell: cell.weight_version)
    positions = summed(sums, lambda cell: cell.position)
    return LogprobReport(
        overall=total(sums.values()).figures(),
        by_engine={name: engines[name].figures() for name in sorted(engines)},
        by_version={name: versions[name].figures() for name in sorted(versions)},
        by_position={place: positions[place].figures() for place in sorted(positions)},
        gaps=gaps,
        masks=masks,
        histograms={name: engines[name].histogram() for name in sorted(engines)},
        mismatch=mismatch,
    )


def _flat(samples: Any) -> list[Sample]:
    """The samples themselves, checked."""
    flat = [
        sample
        for entry in samples
        for sample in (entry.samples if isinstance(entry, SampleGroup) else [entry])
    ]
    for sample in flat:
        sample.check()
    return flat


def _rows(samples: Sequence[Sample], trainer_logprobs: Any) -> list[list[float]]:
    """The trainer's log-probs as lists, one for each output token of each sample."""
    rows = [_floats(index, row) for index, row in enumerate(trainer_logprobs)]
    if len(rows) != len(samples):
        raise ValueError(f"trainer_logprobs has {len(rows)} rows for {len(samples)} samples")
    for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        if len(row) != len(sample.output_ids):
            raise ValueError(
                f"trainer_logprobs[{index}] has {len(row)} values for "
                f"{len(sample.output_ids)} output tokens: cut off prompt and padding"
            )
    return rows


def _floats(index: int, row: Any) -> list[float]:
    """Arrays and tensors have ``tolist``."""
    try:
        return list(map(float, row.tolist() if hasattr(row, "tolist") else row))
    except (TypeError, ValueError) as error:
        raise ValueError(f"trainer_logprobs[{index}] is not a row of numbers: {error}") from None
