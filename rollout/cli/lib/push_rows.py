"""The pushes of a run as the rows of a table."""

from __future__ import annotations

from collections.abc import Iterable

from engines.protocol.plain_text import size_text
from rollout.observability.timeline.analysis import PushTotals

HEADS = ("server", "version", "route of the push", "sent", "changed", "seconds", "paused")


def push_rows(pushes: Iterable[PushTotals]) -> list[tuple[str, ...]]:
    """The cells below ``HEADS``."""
    return [
        (
            push.server,
            str(push.weight_version),
            push.route,
            size_text(push.num_bytes),
            "whole tensors" if push.density is None else f"{push.density:.3%}",
            f"{push.elapsed_s:.2f}",
            f"{push.paused_s:.2f}",
        )
        for push in pushes
    ]
