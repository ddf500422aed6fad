"""File descriptors: two for each request in flight, one to its client and one to its engine."""

from __future__ import annotations

import logging
import resource

_RESERVED = 128

logger = logging.getLogger(__name__)


def connections_within(wanted: int, soft: int, hard: int) -> tuple[int, int]:
    """The soft limit to set, and the connections to engines that it allows."""
    needed = 2 * wanted + _RESERVED
    limit = soft if needed <= soft else min(needed, hard)
    return limit, min(wanted, max(1, (limit - _RESERVED) // 2))


def check_file_descriptors(max_connections: int) -> int:
    """Raise this process's limit as far as needed and allowed; how many connections that makes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    infinite = 1 << 40
    has = [infinite if one == resource.RLIM_INFINITY else one for one in (soft, hard)]
    limit, allowed = connections_within(max_connections, *has)
    if limit != has[0]:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if allowed < max_connections:
        logger.warning(
            "the limit of %d open files allows %d connections to engines, not %d; "
            "raise it (ulimit -Hn) or lower router.max_connections",
            limit,
            allowed,
            max_connections,
        )
    return allowed
