"""The turns of one session as a tree of token ids (pure).

Always true: the prompt of a turn begins with all ids of its parent, prompt and answer; each id is
kept once, in the turn that added it.
"""

from __future__ import annotations

import base64
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from engines.protocol import FinishReason, VersionSpan
from engines.protocol.logprob_kind import LogprobKind
from rollout.agents.model.alignment import Checkpoint, Drift
from rollout.agents.model.images import NO_IMAGES, Images, measured
from rollout.agents.wire.messages import History, Message
from rollout.router.http.fast_json import dumps
from rollout.rules.continuation import join_experts

IDS, LOGPROBS = "I", "d"
"""Types of arrays: of ids, and of their log-probs."""
_BYTES_PER_ID, _BYTES_PER_LOGPROB = 4, 8
Pinned = tuple[()] | tuple[str | None]
"""The version of an adapter that a session stays with, as ``lora_path`` takes it, None for the
base; empty: it stays with none."""
_BYTES_PER_TURN = 2048
_PIECE = 3 << 12
_BYTES_PER_CHECKPOINT = 256
_BYTES_PER_SPAN = 256
_BYTES_PER_IMAGE = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids that a turn's prompt has behind its parent's, and how they came about.

    Attributes:
        checkpoints: of its text, behind those of its parents.
        images: whose placeholders these ids have, one for each.
    """

    parent: int | None
    ids: Sequence[int]
    drift: Drift = Drift.CLEAN
    first_difference: int | None = None
    checkpoints: Sequence[Checkpoint] = ()
    images: Images = NO_IMAGES


@dataclass(frozen=True, slots=True)
class Generated:
    """What an engine generated in a turn.

    Attributes:
        logprobs: one for each id.
        experts: routed experts of the tokens that were computed for this turn and for none before
            it, from the parent's last token to the one before its own last, or None if not
            reported.
        logprob_kind: of the log-probs.
        num_cached: tokens of the whole prompt that came from the engine's cache, or None if it does
            not report them.
        engine_id: the engine that generated the last of it.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: tuple[VersionSpan, ...]
    finish: FinishReason
    text: str
    experts: bytes | None = None
    logprob_kind: LogprobKind | None = None
    num_cached: int | None = None
    engine_id: str = ""


@dataclass(eq=False, slots=True)
class Turn:
    """A prompt and its answer.

    Attributes:
        exact, loose: digests of its messages with its answer.
        asked: loose digest of its messages.
    """

    number: int
    prompt: Prompt
    generated: Generated
    exact: bytes = b""
    loose: bytes = b""
    asked: bytes = b""

    @property
    def end(self) -> int | None:
        """The token that ended the answer, or None if it was cut off."""
        ends = isinstance(self.generated.finish.matched, int) and len(self.generated.ids) > 0
        return self.generated.ids[-1] if ends else None

    @property
    def num_bytes(self) -> int:
        """Upper bound of its memory."""
        prompt, generated, finish = self.prompt, self.generated, self.generated.finish
        texts = [generated.text, str(finish.kind), str(finish.matched or ""), finish.message]
        texts.append(generated.engine_id)
        texts += [span.version for span in generated.versions]
        return (
            _BYTES_PER_TURN
            + _BYTES_PER_ID * (len(prompt.ids) + len(generated.ids))
            + _BYTES_PER_LOGPROB * len(generated.logprobs)
            + sum(len(text) * (1 if text.isascii() else 4) for text in texts)
            + len(generated.experts or b"")
            + _BYTES_PER_CHECKPOINT * len(prompt.checkpoints)
            + _BYTES_PER_SPAN * len(generated.versions)
            + _BYTES_PER_IMAGE * len(prompt.images.digests)
        )

    def json(self) -> Iterator[bytes]:
        """The turn as JSON, in pieces of which none takes long to write."""
        prompt, generated, finish = self.prompt, self.generated, self.generated.finish
        fields = {
            "turn": self.number,
            "parent": prompt.parent,
            "drift": prompt.drift.value,
            "first_difference": prompt.first_difference,
            "weight_versions": [
                {"version": span.version, "start": span.start, "end": span.end}
                for span in generated.versions
            ],
            "finish_reason": {
                "type": finish.kind,
                "matched": finish.matched,
                "message": finish.message,
            },
            "text": generated.text,
            "logprob_kind": generated.logprob_kind,
            "cached_tokens": generated.num_cached,
            "engine_id": generated.engine_id,
            "images": list(prompt.images.digests),
        }
        yield dumps(fields)[:-1]
        yield from _list("prompt_ids", prompt.images.expanded(prompt.ids))
        yield from _list("output_ids", generated.ids)
        yield from _list("output_logprobs", generated.logprobs)
        experts = generated.experts
        yield b',"routed_experts":' + (b"null" if experts is None else b'"')
        for at in range(0, len(experts or b""), _PIECE):
            yield base64.b64encode((experts or b"")[at : at + _PIECE])
        yield b"}" if experts is None else b'"}'


def _list(name: str, values: Sequence[float]) -> Iterator[bytes]:
    yield b',"%s":[' % name.encode()
    for at in range(0, len(values), _PIECE):
        yield (b"," if at else b"") + dumps(list(values[at : at + _PIECE]))[1:-1]
    yield b"]"


@dataclass(frozen=True, slots=True)
class Known:
    """What a session has of a new request: the turn that it continues, if there is one.

    Attributes:
        parent: number of that turn, or None for a new beginning.
        num_known: messages whose ids are known; the last one is the turn's answer.
        is_fork: the client changed an answer behind that.
        end: the token that ended the turn's answer, or None if it was cut off.
        ids: up to the end of the answer.
        num_answer: how many of them are the answer.
        checkpoints: of these ids.
        is_unfinished: the request continues the answer itself.
    """

    parent: int | None = None
    num_known: int = 0
    is_fork: bool = False
    end: int | None = None
    ids: array[int] = field(default_factory=lambda: array(IDS))
    num_answer: int = 0
    checkpoints: Sequence[Checkpoint] = ()
    is_unfinished: bool = False


@dataclass(frozen=True, slots=True)
class Match:
    """Where a new request continues.

    Attributes:
        turn: None for a new beginning.
        num_known: messages whose ids are known; the last one is the answer of ``turn``.
        is_fork: the client changed an answer behind that.
    """

    turn: Turn | None
    num_known: int
    is_fork: bool


@dataclass(eq=False, slots=True)
class TurnTree:
    """All turns of one session."""

    turns: list[Turn] = field(default_factory=list)
    _exact: dict[bytes, Turn] = field(default_factory=dict)
    _loose: dict[bytes, Turn] = field(default_factory=dict)
    _answered: set[bytes] = field(default_factory=set)

    def match(self, history: History) -> Match:
        """The longest beginning of a request that ends with an answer of this session.

        Of several turns with the same messages, the last one matches.
        """
        turn, num_known = self._longest(history)
        is_fork = any(
            history.is_answer[index] and history.loose[index] in self._answered
            for index in range(num_known, len(history.is_answer))
        )
        return Match(turn, num_known, is_fork)

    def known(self, history: History, begun: str = "", reasoning: str = "") -> Known:
        """What there is of a request.

        Args:
            begun: the beginning of its answer, which the client gives.
            reasoning: the thinking before it.
        """
        match = self.match(history)
        unfinished = None
        if begun or reasoning:
            unfinished = self._unfinished(history, begun, reasoning)
        turn = unfinished or match.turn
        if turn is None:
            return Known(is_fork=match.is_fork)
        return Known(
            turn.number,
            match.num_known,
            match.is_fork,
            turn.end,
            self.ids(turn),
            self._num_answer(turn),
            self.checkpoints(turn),
            is_unfinished=unfinished is not None,
        )

    def _num_answer(self, turn: Turn) -> int:
        """Ids of a turn's answer, with those of the unfinished turns that it continues."""
        num = len(turn.generated.ids)
        while len(turn.prompt.ids) == 0 and turn.prompt.parent is not None:
            turn = self.turns[turn.prompt.parent]
            num += len(turn.generated.ids)
        return num

    def _unfinished(self, history: History, begun: str, reasoning: str) -> Turn | None:
        """The turn whose answer to these messages is ``begun``, if no token ended it."""
        answer = {"role": "assistant", "content": begun, "reasoning_content": reasoning}
        exact, loose = history.plus(answer)
        found = self._exact.get(exact) or (None if reasoning else self._loose.get(loose))
        return found if found is not None and found.end is None else None

    def _longest(self, history: History) -> tuple[Turn | None, int]:
        for num in range(len(history.is_answer), 0, -1):
            if history.is_answer[num - 1]:
                found = self._exact.get(history.exact[num]) or self._loose.get(history.loose[num])
                if found is not None:
                    return found, num
        return None, 0

    def ids(self, turn: Turn | None) -> array[int]:
        """All ids up to the end of a turn's answer."""
        ids = array(IDS)
        for ancestor in self._path(turn):
            ids += array(IDS, ancestor.prompt.ids)
            ids += array(IDS, ancestor.generated.ids)
        return ids

    def checkpoints(self, turn: Turn | None) -> list[Checkpoint]:
        """Checkpoints of the prompts from the root to a turn's own."""
        return [each for ancestor in self._path(turn) for each in ancestor.prompt.checkpoints]

    def new_experts(self, prompt: Prompt, reported: bytes | None, num_tokens: int) -> bytes | None:
        """The part of ``reported`` that a turn with this prompt adds, or None if a part is missing.

        Args:
            reported: routed experts of all ``num_tokens`` that were computed.

        Raises:
            ValueError: they are those of another number of tokens.
        """
        parent = None if prompt.parent is None else self.turns[prompt.parent]
        kept = [turn.generated.experts for turn in self._path(parent)]
        known = [experts for experts in kept if experts is not None]
        if reported is None or len(known) < len(kept):
            return None
        before = b"".join(known)
        if join_experts(before, reported, num_tokens) is None:
            raise ValueError(f"the routed experts are not those of {num_tokens} tokens")
        return reported[len(before) :]

    def measured(self, prompt: Prompt, reported: Sequence[int] | None) -> Prompt:
        """A prompt with the sizes of its images; raises as ``images.measured`` does.

        Args:
            reported: the ids of the whole prompt that the engine computed.
        """
        if not prompt.images.digests:
            return prompt
        before = self._before(prompt)
        num_before = sum(len(turn.prompt.images.digests) for turn in before)
        sent = self.ids(before[-1] if before else None) + array(IDS, prompt.ids)
        return replace(prompt, images=measured(prompt.images, num_before, sent, reported))

    def num_added(self, prompt: Prompt) -> int:
        """Ids that an engine computes of the whole prompt beside those that it gets."""
        images = [turn.prompt.images for turn in self._before(prompt)]
        return sum(image.num_added for image in (*images, prompt.images))

    def _before(self, prompt: Prompt) -> list[Turn]:
        return self._path(None if prompt.parent is None else self.turns[prompt.parent])

    def _path(self, turn: Turn | None) -> list[Turn]:
        """From the first turn to this one."""
        path = []
        while turn is not None:
            path.append(turn)
            parent = turn.prompt.parent
            turn = None if parent is None else self.turns[parent]
        return path[::-1]

    def made(self, history: History, prompt: Prompt, generated: Generated, answer: Message) -> Turn:
        """A finished turn, the next one to ``add``.

        Raises:
            ValueError: it has not one log-prob for each token.
            TypeError, OverflowError: as ``compact_generated`` does.
        """
        if len(generated.ids) != len(generated.logprobs):
            raise ValueError(
                f"{len(generated.logprobs)} log-probs for {len(generated.ids)} tokens; the turn "
                "is not kept"
            )
        exact, loose = history.plus(answer)
        parts = _compact(prompt), compact_generated(generated)
        return Turn(len(self.turns), *parts, exact, loose, history.loose[-1])

    def add(self, turn: Turn) -> None:
        """Keep a turn.

        Raises:
            ValueError: it is not the next one, or continues none that is there.
        """
        parent = turn.prompt.parent
        if turn.number != len(self.turns):
            raise ValueError(f"turn {turn.number} follows {len(self.turns)} turns")
        if parent is not None and not 0 <= parent < turn.number:
            raise ValueError(f"turn {turn.number} continues turn {parent}")
        self.turns.append(turn)
        self._exact[turn.exact] = self._loose[turn.loose] = turn
        self._answered.add(turn.asked)


def _compact(prompt: Prompt) -> Prompt:
    return replace(prompt, ids=array(IDS, prompt.ids))


def compact_generated(generated: Generated) -> Generated:
    """The same with its tokens as they are held; for 64 k tokens it takes 1.5 ms.

    Raises:
        TypeError, OverflowError: they are no ids or log-probs.
    """
    ids, logprobs = array(IDS, generated.ids), array(LOGPROBS, generated.logprobs)
    return replace(generated, ids=ids, logprobs=logprobs)
