"""Which worker of the agents' program has a session (pure).

Always true: any process with a session's id and the number of workers finds the same one.
"""

from __future__ import annotations

from zlib import crc32


def worker_of(session_id: str, num_workers: int) -> int:
    """The number of the session's worker, from 0."""
    return crc32(session_id.encode("utf-8", "surrogatepass")) % num_workers
