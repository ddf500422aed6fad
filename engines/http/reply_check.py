"""What is true of the tokens of every usable reply, for all its readers.

Router, sessions, driver and clients read replies in several forms; the rule is here alone:

- Token ids are whole numbers within the vocabulary.  Where that is not known: of 32 bits.
- A log-prob is a finite number and not above 0, but for rounding.
- Each token has one log-prob, which names that token where the form has names, and one entry in
  each other list of tokens.
- A weight version is known, and versions begin at the first token and follow each other.
- There is a row of routed experts for each token that was computed: all but the last one.
- Each token is one of the ids that its mask left to draw it from.

Pure.  Replies are long and read on event loops, so lists are looked at by functions in C.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from engines.protocol.types import NO_NUMBER

MOST_LOGPROB = 1e-3
"""Rounding may bring the log-prob of a certain token above 0, by about 1e-6 in float32; a thousand
times more is no rounding.  By their sources, vLLM 0.32 takes ``log_softmax`` in float32
(``v1/sample/sampler.py``), and SGLang 0.5.23 that, or the ``log`` of a float32 softmax, or in its
on-policy mode ``log_softmax`` of bfloat16 (``srt/layers/sampler.py``): with the greatest logit
taken off, none of these is above 0.  Kernels on GPUs were not looked at."""
MOST_IDS = 1 << 32
_LOGPROB, _TOKEN = itemgetter(0), itemgetter(1)
_LEAST = -float("inf")
_RARELY_LESS = NO_NUMBER / 2  # the sum of log-probs, without one of the least number


SAMPLING_MASK = "output_token_sampling_mask"
"""SGLang's list of what each token was drawn from."""


class UnusableReply(ValueError):
    """The tokens of a reply contradict each other, or cannot be."""


class NotFinite(UnusableReply):
    """An engine has computed NaN."""


def check_ids(ids: Sequence[Any], vocabulary: int = MOST_IDS) -> None:
    """Check token ids.

    Args:
        vocabulary: how many tokens the model has.

    Raises:
        UnusableReply: one is not an id of this vocabulary.
    """
    try:
        array("I", ids)  # it takes whole numbers of 32 bits, and no others, in the least time
        if vocabulary >= MOST_IDS or not ids or max(ids) < vocabulary:
            return
    except (TypeError, OverflowError):
        pass
    wrong = next(
        (token for token in ids if not (isinstance(token, int) and 0 <= token < vocabulary)), ids
    )
    raise UnusableReply(
        f"the output id {wrong!r:.60} is no whole number from 0 to {vocabulary - 1}, as the "
        "tokens of the vocabulary are"
    )


def check_logprobs(logprobs: Sequence[Any]) -> None:
    """Check log-probs of tokens: for NaN SGLang has null, and vLLM a number.

    Raises:
        NotFinite: one is NaN, or stands for it.
        UnusableReply: one is another thing than a log-prob.
    """
    if not logprobs:
        return
    try:
        total = sum(logprobs)  # NaN if one is
        most = max(logprobs)
    except TypeError:
        others = (value for value in logprobs if not isinstance(value, float | int | None))
        if (wrong := next(others, None)) is not None:
            raise UnusableReply(f"the log-prob {wrong!r:.60} is not a number") from None
        raise NotFinite(_NOT_FINITE) from None
    if not total > _RARELY_LESS and (total != total or total == _LEAST or NO_NUMBER in logprobs):
        raise NotFinite(_NOT_FINITE)
    if most > MOST_LOGPROB:
        place = list(logprobs).index(most)
        raise UnusableReply(f"the log-prob of new token {place} is {most:.6g}, which is above 0")


_NOT_FINITE = "it computed log-probs that are not numbers (null, or vLLM's -9999)"


def check_lengths(num_ids: int, num_logprobs: int) -> None:
    """Check that each token has one log-prob.

    Raises:
        UnusableReply: it has not.
    """
    if num_ids != num_logprobs:
        raise UnusableReply(f"{num_ids} output ids but {num_logprobs} log-probs")


def check_tokens(ids: Sequence[Any], logprobs: Sequence[Any], named: Sequence[Any]) -> None:
    """Check log-probs, each with the id of its token.

    Args:
        named: kind of the log-probs.

    Raises:
        UnusableReply: one is wrong, or of another token.
    """
    if len(ids) != len(logprobs):
        check_lengths(len(ids), len(logprobs))
    check_logprobs(logprobs)
    if named != ids and list(named) != list(ids):
        place, token, other = next(
            (place, token, other)
            for place, (token, other) in enumerate(zip(ids, named, strict=True))
            if token != other
        )
        raise UnusableReply(f"new token {place} is {token}, and its log-prob is of {other!r:.60}")


def check_pairs(ids: Sequence[Any], pairs: Sequence[Any]) -> None:
    """The same for SGLang's entries, such as ``[-0.5, 17, null]``."""
    check_tokens(ids, list(map(_LOGPROB, pairs)), list(map(_TOKEN, pairs)))


def check_columns(columns: Mapping[str, Sequence[Any]], num: int) -> None:
    """Check that lists of tokens, by name, have an entry for each of ``num``.

    Raises:
        UnusableReply: one has not.
    """
    for name, values in columns.items():
        if len(values) != num:
            raise UnusableReply(f"{len(values)} {name} for {num} tokens")


def check_masks(ids: Sequence[int], masks: Any, vocabulary: int = MOST_IDS) -> None:
    """Check what each of these tokens was drawn from: a list of ids, or None for all.

    Raises:
        UnusableReply: one is missing, or is another thing, or its token is none of them.
    """
    if not isinstance(masks, Sequence) or len(masks) != len(ids):
        raise UnusableReply(f"its sampling masks are not those of {len(ids)} tokens")
    for place, (token, mask) in enumerate(zip(ids, masks, strict=True)):
        if mask is None:
            continue
        if not isinstance(mask, list | tuple) or token not in mask:
            raise UnusableReply(f"new token {place} is {token}, which its sampling mask cuts")
        check_ids(mask, vocabulary)


def check_versions(version: Any, spans: Any, num: int) -> None:
    """Check the weight versions of tokens.

    Args:
        version: weight version of the engine when it wrote the reply.
        spans: list of ``{"version": "3", "start": 0, "end": 5}``; without any, all tokens are of
            ``version``.
        num: tokens.

    Raises:
        UnusableReply: one is missing, or is no version, or the spans do not follow each other.
    """
    if not num or (type(version) is str and version and not spans):
        return
    if spans:
        _check_spans(spans)
    if not _is_version(version) and not (version is None and spans):
        raise UnusableReply(f"the weight version of its tokens is {version!r:.60}")


def _check_spans(spans: Iterable[Any]) -> None:
    end = 0
    for span in spans:
        if not isinstance(span, Mapping) or not _is_version(span.get("version")):
            raise UnusableReply(f"{span!r:.100} does not name the weight version of its tokens")
        begin, next_end = span.get("start"), span.get("end")
        if type(begin) is not int or type(next_end) is not int or begin != end or next_end < end:
            raise UnusableReply(f"weight versions: {span!r:.100} does not begin at token {end}")
        end = next_end


def _is_version(version: Any) -> bool:
    return type(version) is int or (isinstance(version, str) and version != "")


def check_experts(experts: Any, num: int) -> None:
    """Check routed experts.

    Args:
        experts: in base64, or None for none.
        num: tokens that were computed.

    Raises:
        UnusableReply: they are not rows of ``num`` tokens.
    """
    if experts is None:
        return
    if not isinstance(experts, str):
        raise UnusableReply(f"its routed experts are no text: {experts!r:.60}")
    num_bytes = len(experts) // 4 * 3 - experts[-2:].count("=")
    if len(experts) % 4 or num_bytes <= 0 or num <= 0 or num_bytes % num:
        raise UnusableReply(f"{num_bytes} bytes of routed experts do not fit {num} tokens")


def check_generate(
    answer: Any, *, wants_logprobs: bool = False, begin: int = 0, vocabulary: int = MOST_IDS
) -> int:
    """Check a reply of ``/generate``, or what has come of it.

    Args:
        wants_logprobs: were requested.
        begin: tokens that were checked before.
        vocabulary: how many tokens the model has.

    Returns:
        Its tokens.

    Raises:
        UnusableReply: it cannot be used.
        TypeError: it has another form; or ``LookupError`` or ``AttributeError``.
    """
    meta, ids = answer["meta_info"], answer.get("output_ids") or ()
    num, pairs = len(ids), meta.get("output_token_logprobs")
    new = ids[begin:]
    check_ids(new, vocabulary)
    if pairs is not None or (wants_logprobs and num):
        check_lengths(num, len(pairs or ()))
        check_pairs(new, pairs[begin:])
    check_versions(meta.get("weight_version"), meta.get("weight_versions"), num)
    if num and (experts := meta.get("routed_experts")) is not None:
        check_experts(experts, meta.get("prompt_tokens", 0) + num - 1)
    if (masks := meta.get(SAMPLING_MASK)) is not None:
        check_columns({SAMPLING_MASK: masks}, num)
        check_masks(new, masks[begin:], vocabulary)
    return num
