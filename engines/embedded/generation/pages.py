"""Which pages of the KV cache are free, whose they are, and which hold a known prefix.

Always true: a page is free, or idle (in no sequence, and found by the prefix of its contents), or
in use by one sequence or more; a page is found only by all tokens up to its end, under the same
adapter and key.
Idle pages are given up when no other is free, the longest unused first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count

PAGE_SIZE = 16
"""Tokens."""

Node = int | tuple[int, str]
"""The number of a page with its prefix; or the load of an adapter (0: none) and a request's key,
where prefixes begin."""

_Key = tuple[Node, tuple[int, ...]]
"""The node of the page before, and a page's own tokens."""


class Pages:
    """All pages of one cache, by number.

    A prefix is a path of nodes, one for each page.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._nodes = count(1)  # of no two pages the same, however often one is used again
        self._num_users = [0] * num_pages
        self._free = list(range(num_pages))[::-1]
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, _Key] = {}
        self._known: dict[_Key, tuple[int, Node]] = {}

    @property
    def num_free(self) -> int:
        """Pages that can be taken."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, num: int) -> list[int]:
        """So many pages of unknown contents; no more than ``num_free``."""
        taken = []
        for _ in range(num):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._known[self._key_of.pop(page)]
            self._num_users[page] = 1
            taken.append(page)
        return taken

    def give(self, pages: Sequence[int]) -> None:
        """A sequence has no more use for these, which are its first ones, in order."""
        for page in reversed(pages):  # without the pages before it, a page is not found
            self._num_users[page] -= 1
            if not self._num_users[page]:
                if page in self._key_of:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def find(self, ids: Sequence[int], root: Node) -> tuple[list[int], Node]:
        """Take the known pages of the longest prefix of ``ids``, and the node of the last one."""
        pages: list[int] = []
        node = root
        for end in range(PAGE_SIZE, len(ids) + 1, PAGE_SIZE):
            known = self._known.get((node, tuple(ids[end - PAGE_SIZE : end])))
            if known is None:
                break
            page, node = known
            self._num_users[page] += 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages, node

    def learn(self, page: int, node: Node, ids: Sequence[int]) -> Node:
        """A page now holds these tokens, after those of ``node``; returns its own node."""
        key = node, tuple(ids)
        if key not in self._known:
            self._known[key] = page, next(self._nodes)
            self._key_of[page] = key
        return self._known[key][1]

    def forget(self) -> None:
        """Forget every prefix: its contents are lost, or of older weights."""
        self._known.clear()
        self._key_of.clear()
        self._free += self._idle
        self._idle.clear()
