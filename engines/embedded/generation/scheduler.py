"""Which tokens of which sequences the next step computes; plain values, no tensors.

Always true: in the order of their admission, each sequence goes before every later one, so the
first one always gets on; where the cache is full, the latest one gives its pages back and begins
again, with the completion so far as part of its prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from engines.embedded.generation.generation import Generation
from engines.embedded.generation.pages import PAGE_SIZE, Node, Pages


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation's place in the batch.

    Attributes:
        ids: prompt and completion so far.
        num_cached: tokens whose keys and values are in the cache.
        pages: where these are.
        num_known: pages that others find by their prefix.
        node: of the last one of those.
    """

    generation: Generation
    ids: list[int]
    num_cached: int = 0
    pages: list[int] = field(default_factory=list)
    num_known: int = 0
    node: Node = 0

    @property
    def num_pending(self) -> int:
        return len(self.ids) - self.num_cached

    @property
    def root(self) -> Node:
        adapter = self.generation.adapter
        return (0 if adapter is None else adapter.salt), self.generation.cache_key


@dataclass(frozen=True, slots=True)
class Part:
    """What a step computes of one sequence.

    Attributes:
        num_tokens: new ones.
        is_last: they are all that are pending, so a next token comes out of it.
        new_pages: those of the sequence that hold nothing yet.
    """

    sequence: Sequence
    num_tokens: int
    is_last: bool
    new_pages: list[int]


class Scheduler:
    """Sequences that run, and those that wait, by request id.

    Args:
        max_requests: in one step.
        max_tokens: new ones in one step; a longer prompt is split.
    """

    def __init__(self, pages: Pages, *, max_requests: int, max_tokens: int) -> None:
        self.pages = pages
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.running: OrderedDict[str, Sequence] = OrderedDict()
        self.waiting: OrderedDict[str, Sequence] = OrderedDict()

    def add(self, generation: Generation) -> None:
        ids = generation.prompt_ids + generation.output_ids
        self.waiting[generation.rid] = Sequence(generation, ids)

    def next_step(self) -> list[Part]:
        """The parts of the next step; empty only if there is no sequence."""
        parts: OrderedDict[str, Part] = OrderedDict()
        room = self._max_tokens
        # Next tokens go before the rest of prompts.
        for sequence in sorted(self.running.values(), key=lambda running: running.num_pending > 1):
            rid, num = sequence.generation.rid, min(sequence.num_pending, room)
            if num and rid in self.running and self._grow(sequence, num, parts):
                room -= num
        while self.waiting and room and len(self.running) < self._max_requests:
            sequence = next(iter(self.waiting.values()))
            if not self._admit(sequence):
                break
            num = min(sequence.num_pending, room)
            self._grow(sequence, num, parts)
            room -= num
        return list(parts.values())

    def advance(self, part: Part) -> None:
        """The tokens of this part are in the cache now."""
        sequence = part.sequence
        sequence.num_cached += part.num_tokens
        for index in range(sequence.num_known, sequence.num_cached // PAGE_SIZE):
            ids = sequence.ids[index * PAGE_SIZE : (index + 1) * PAGE_SIZE]
            sequence.node = self.pages.learn(sequence.pages[index], sequence.node, ids)
            sequence.num_known = index + 1

    def remove(self, rid: str) -> Generation | None:
        """End a sequence, or None if there is none of this id."""
        sequence = self.running.pop(rid, None)
        if sequence is not None:
            self.pages.give(sequence.pages)
        else:
            sequence = self.waiting.pop(rid, None)
        return None if sequence is None else sequence.generation

    @property
    def num_in_flight(self) -> int:
        return len(self.running) + len(self.waiting)

    def rids(self) -> list[str]:
        return [*self.running, *self.waiting]

    def retract(self) -> None:
        """Put all running sequences back in the queue, before those that wait."""
        while self.running:
            self._put_back()

    def _put_back(self) -> Sequence:
        """The latest sequence gives its pages back and waits again, before all others."""
        rid, sequence = self.running.popitem()
        self.pages.give(sequence.pages)
        self.waiting[rid] = Sequence(sequence.generation, sequence.ids)
        self.waiting.move_to_end(rid, last=False)
        return sequence

    def _admit(self, sequence: Sequence) -> bool:
        """Let the first one that waits run, if there is room for all of it and, lest it is put
        back at once, for the next page of each other one."""
        sequence.node = sequence.root
        if not sequence.generation.wants_experts:  # the cache has none of its tokens
            # The last token is always computed: the next one comes out of it.
            sequence.pages, sequence.node = self.pages.find(sequence.ids[:-1], sequence.root)
        missing = _pages_for(len(sequence.ids)) - len(sequence.pages)
        if self.running and self.pages.num_free < missing + len(self.running):
            self.pages.give(sequence.pages)
            sequence.pages = []
            return False
        sequence.num_known = len(sequence.pages)
        sequence.num_cached = sequence.num_known * PAGE_SIZE
        if not sequence.generation.output_ids:
            sequence.generation.cached_tokens = sequence.num_cached
        self.running[sequence.generation.rid] = self.waiting.pop(sequence.generation.rid)
        return True

    def _grow(self, sequence: Sequence, num: int, parts: OrderedDict[str, Part]) -> bool:
        """Take pages for ``num`` more tokens, if need be from later sequences."""
        missing = _pages_for(sequence.num_cached + num) - len(sequence.pages)
        while self.pages.num_free < missing:
            latest = self._put_back()
            parts.pop(latest.generation.rid, None)
            if latest is sequence:
                return False
        new = self.pages.take(missing)
        sequence.pages += new
        is_last = num == sequence.num_pending
        parts[sequence.generation.rid] = Part(sequence, num, is_last, new)
        return True


def _pages_for(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_SIZE)
