"""Whether a push is one that a server can take, before anything of it is sent."""

from __future__ import annotations

from rollout.config import WeightUpdate
from rollout.errors import WeightMismatch
from rollout.weights.manifest import Manifest, check_push
from rollout.weights.push import WeightPush


def check_fits(
    push: WeightPush, server: str, update: WeightUpdate, published: int, expected: Manifest | None
) -> None:
    """Refuse a push that this server could not take, or would take wrongly.

    Args:
        update: the server's ``weights.update``.
        published: the weight version that its engines were given last.
        expected: the tensors of its model; None where the checkpoint does not say.

    Raises:
        WeightMismatch: what is wrong with it; nothing was sent.
    """
    if update is WeightUpdate.FROZEN:
        raise WeightMismatch(f"server {server} is frozen: its weights are never updated")
    if push.version <= published:
        raise WeightMismatch(
            f"weight version {push.version} is not newer than {published}, "
            "which the engines were given last"
        )
    if push.is_empty:
        raise WeightMismatch(f"the push of weight version {push.version} holds no tensors")
    contents = push.contents_under(update)
    if contents is not update and update is not WeightUpdate.LORA:
        raise WeightMismatch(
            f"a push of contents {contents!s} to server {server}, whose weights.update is "
            f"{update!s}: only with lora are adapters pushed, and the base under them"
        )
    if expected is not None and contents is not WeightUpdate.LORA:
        check_push(push.manifest, expected, must_be_complete=contents is WeightUpdate.FULL)
