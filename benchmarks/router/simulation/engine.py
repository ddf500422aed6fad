"""An engine in virtual time: a queue, a batch, a KV budget and a cache of prefixes.

Always true: tokens of running requests and of cached prefixes together fit the budget.

What it does as SGLang does: prefill goes before decode, a batch of decodes goes on together, a
request waits until its KV fits, prefixes are evicted by the time of their last use, from their
ends.  What it leaves out: a request reserves the KV of its whole answer, so none is retracted;
the cost of a prefill is linear in its tokens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Costs:
    """What an engine can hold and how fast it is.

    The defaults are of the order of a model of 8 billion parameters on one H100.

    Attributes:
        kv_tokens: the budget.
        prefill_s: of one token that is not cached.
        step_s: of a step of decoding, whatever its batch.
        sequence_s: more for each sequence of the batch.
        kv_s: more for each token of context in the batch.
        chunk_tokens: a prefill takes no further request beyond this.
    """

    kv_tokens: int = 400_000
    prefill_s: float = 40e-6
    step_s: float = 7e-3
    sequence_s: float = 30e-6
    kv_s: float = 40e-9
    chunk_tokens: int = 8192


DEFAULT_COSTS = Costs()


@dataclass(slots=True)
class Turn:
    """One request of a session.

    Attributes:
        prompt: tokens, with all earlier turns.
        root: how many of them all sessions begin with.
        output: tokens of the answer.
        cached: tokens that were in the cache when it began; filled in by the engine.
    """

    session: int
    number: int
    prompt: int
    root: int
    output: int
    cached: int = 0
    left: int = 0

    @property
    def own(self) -> int:
        """The KV it needs at its end, without the shared root."""
        return self.prompt - self.root + self.output


@dataclass(slots=True)
class _Action:
    began_s: float
    ends_s: float
    steps: int = 0
    step_s: float = 0.0
    prefills: list[Turn] = field(default_factory=list)


class Engine:
    """One engine.  ``at`` is called when its action ends, and gives what finished.

    Attributes:
        cached: tokens of the prefixes that no running request uses, the oldest first.
        root: tokens of the shared root in its cache.
    """

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.waiting: deque[Turn] = deque()
        self.running: list[Turn] = []
        self.cached: OrderedDict[int, int] = OrderedDict()
        self.root = 0
        self._action: _Action | None = None
        self._reserved = 0
        self._evictable = 0

    @property
    def kv_used(self) -> int:
        return self.root + self._reserved + self._evictable

    def ends_s(self) -> float | None:
        """When its action ends; None if it is idle."""
        return None if self._action is None else self._action.ends_s

    def add(self, turn: Turn, now_s: float) -> None:
        """A request arrives."""
        if turn.root + turn.own > self.costs.kv_tokens:
            raise ValueError(f"{turn.root + turn.own} tokens do not fit {self.costs.kv_tokens}")
        self.waiting.append(turn)
        action = self._action
        if action is None:
            self._begin(now_s)
        elif action.steps:  # a batch of decodes takes new requests between two steps
            done = int((now_s - action.began_s) / action.step_s) + 1
            action.steps = min(action.steps, done)
            action.ends_s = action.began_s + action.steps * action.step_s

    def at(self, now_s: float) -> list[Turn]:
        """The action ends: what finished, and the next one begins."""
        action = self._action
        assert action is not None
        finished: list[Turn] = []
        if action.steps:
            for turn in self.running:
                turn.left -= action.steps
            finished = [turn for turn in self.running if turn.left <= 0]
            self.running = [turn for turn in self.running if turn.left > 0]
        for turn in action.prefills:
            turn.left -= 1  # a prefill gives the first token
            (self.running if turn.left else finished).append(turn)
        for turn in finished:
            self._reserved -= turn.own
            self.cached[turn.session] = turn.own
            self._evictable += turn.own
        self._begin(now_s)
        return finished

    def lose(self) -> list[Turn]:
        """The engine dies: its requests; its cache is empty."""
        lost = [*self.waiting, *self.running]
        if self._action is not None:
            lost += self._action.prefills
        self.__init__(self.costs)  # type: ignore[misc]
        return lost

    def _begin(self, now_s: float) -> None:
        costs, prefills, num_tokens = self.costs, [], 0
        while self.waiting and num_tokens < costs.chunk_tokens:
            turn = self.waiting[0]
            if not self._admit(turn):
                break
            self.waiting.popleft()
            prefills.append(turn)
            num_tokens += turn.prompt - turn.cached
        if prefills:
            ends_s = now_s + costs.step_s + costs.prefill_s * num_tokens
            self._action = _Action(now_s, ends_s, prefills=prefills)
        elif self.running:
            steps = min(turn.left for turn in self.running)
            context = sum(turn.prompt + turn.output - turn.left for turn in self.running)
            step_s = costs.step_s + costs.sequence_s * len(self.running) + costs.kv_s * context
            self._action = _Action(now_s, now_s + steps * step_s, steps, step_s)
        else:
            self._action = None

    def _admit(self, turn: Turn) -> bool:
        """Whether its KV fits; then its place is reserved, and what is in the way evicted."""
        new_root = max(0, turn.root - self.root)
        if self.root + new_root + self._reserved + turn.own > self.costs.kv_tokens:
            return False
        held = self.cached.pop(turn.session, 0)
        self._evictable -= held
        turn.cached = min(turn.root, self.root) + min(held, turn.prompt - turn.root - 1)
        turn.left = turn.output
        self.root += new_root
        self._reserved += turn.own
        while (over := self.kv_used - self.costs.kv_tokens) > 0:
            session, tokens = next(iter(self.cached.items()))
            if tokens > over:
                self.cached[session] = tokens - over  # from its end; it stays the oldest
                self._evictable -= over
            else:
                self._evictable -= self.cached.pop(session)
        return True
