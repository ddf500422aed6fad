"""Which requests an abort names, and which of them engines have."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.rules.routing import Backend


@dataclass(frozen=True, slots=True)
class AbortOrder:
    """The requests that a client wants to end.

    An id names the request that has exactly this one.  Several requests are named by a list of ids,
    or by a key, which is what all of their ids begin with, up to a sign that ends it: ``r-1/``
    names ``r-1/a``, and neither ``r-1`` nor ``r-10``.

    Attributes:
        rids: ids of requests, or of prompts of a request.
        prefix: the beginning of ids, or empty for none.
        is_for_all: all requests.
    """

    rids: frozenset[str] = frozenset()
    prefix: str = ""
    is_for_all: bool = False

    def names(self, rid: str) -> bool:
        """Whether the request with this id shall end."""
        begins_so = bool(self.prefix) and rid.startswith(self.prefix)
        return self.is_for_all or (rid != "" and rid in self.rids) or begins_so


@dataclass(slots=True)
class AbortedRequests:
    """The requests that an order has found.

    Attributes:
        num_held: those that were held, which have ended.
        num_on_engines: those that engines have.
        engines: by id, each with the ids that it knows them by.
        left_to: ids of the engines that alone can end what they have of it, because the rest of a
            request goes on, or a request did not come through here.
    """

    num_held: int = 0
    num_on_engines: int = 0
    engines: dict[str, tuple[Backend, list[str]]] = field(default_factory=dict)
    left_to: set[str] = field(default_factory=set)

    def add(self, member: Backend, ids: list[str], *, is_left_to_it: bool) -> None:
        """Note what this engine has to end."""
        self.engines.setdefault(member.engine_id, (member, []))[1].extend(ids)
        if is_left_to_it:
            self.left_to.add(member.engine_id)
