"""New weights for the engines of one group.

Always true: a push that does not fit an engine's own list of tensors is refused before anything is
sent.  From the first change until the end of a push, an engine has no weight version and is not
verified, so that half a push never serves.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from rollout.config import WeightUpdate
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.state import EngineState
from rollout.control.group.engine_set import EngineSet
from rollout.core.errors import WeightMismatch
from rollout.core.fanout import EngineReply
from rollout.rules.fingerprint_check import ALL_TENSORS
from rollout.weights.format.manifest import Manifest, check_push
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.routes.broadcast import process_text

logger = logging.getLogger(__name__)


class WeightUpdater:
    """Sends pushes to a group, and records their contents per engine.

    Attributes:
        fingerprints: of the tensors of the last push, if the trainer computed them.
    """

    def __init__(self, settings: GroupSettings, engines: EngineSet) -> None:
        self.fingerprints: dict[str, str] = {}
        self._settings = settings
        self._engines = engines

    async def push(self, push: WeightPush, budget_s: float) -> dict[str, EngineReply[None]]:
        """Send a push to every engine that is not fenced; replies by engine id.

        An engine that came after a push with several routes was planned waits for the next push.

        Args:
            budget_s: for the whole push; a late engine is one that failed.

        Raises:
            WeightMismatch: an engine has no such tensors, and nothing was sent.
            WeightsUnavailable: the trainer did not send what it announced.
        """
        members = [member for member in self._engines.unfenced() if push.route_of(member.engine_id)]
        contents = push.contents_under(self._settings.update)
        self.check(push)
        sent = self.fingerprints = {}
        groups = {member.engine_id: member.update_group for member in members}
        targets = {member.engine_id: _target(member) for member in members}
        try:
            answers = await push_weights(
                push,
                targets,
                budget_s=budget_s,
                reader=self._settings.name,
                on_begin=lambda: self.mark_changed(push),
                fingerprints=sent,
                groups=groups,
            )
        finally:
            for member in members:
                member.update_group = groups.get(member.engine_id, "")
        planned = set(members)
        for member in self._engines.unfenced():
            if member not in planned:
                logger.warning(
                    "engine %s came after the push of weight version %d was planned: it gets "
                    "requests after the next push",
                    member.engine_id,
                    push.version,
                )
                member.is_stale = True
        for member in members:
            if answers[member.engine_id].failure is None:
                self._record_push(member, push, contents, sent)
        return answers

    def check(self, push: WeightPush) -> None:
        """Check a push against the engines' own lists of tensors.

        Raises:
            WeightMismatch: an engine has no such tensors.
        """
        for member in self._engines.unfenced():
            contents = push.contents_under(self._settings.update)
            _check(push, contents, member, self._settings.not_pushed)

    def mark_changed(self, push: WeightPush) -> None:
        """From now on the engines have no version and are not verified."""
        is_full = push.contents_under(self._settings.update) is WeightUpdate.FULL
        has_all = is_full and not self._settings.not_pushed
        changed = ALL_TENSORS if has_all else frozenset(push.manifest.tensors)
        for member in self._engines.unfenced():
            member.weight_version = None
            member.is_verified = False
            member.changed |= changed

    def _record_push(
        self, member: EngineState, push: WeightPush, contents: WeightUpdate, sent: Mapping[str, str]
    ) -> None:
        known = {} if contents is WeightUpdate.FULL else member.pushed
        replaced = push.manifest.tensors.keys()
        member.pushed = {name: known[name] for name in known.keys() - replaced} | dict(sent)
        member.pushed_dtypes |= {
            name: tensor.dtype for name, tensor in push.manifest.tensors.items()
        }
        member.expected = {"": push.canary} if push.canary else {}
        if contents is WeightUpdate.FULL or not member.is_stale:
            member.weight_version, member.is_stale = push.version, False


def _target(member: EngineState) -> PushTarget:
    return PushTarget(
        member.engine,
        member.num_payloads,
        member.has_session,
        process_text(member.process.processes),
        reports_groups=member.reports_groups,
        is_compared=member.has_checker and bool(member.fingerprint_method),
        weight_version=member.weight_version if member.is_verified else None,
    )


def _check(
    push: WeightPush, contents: WeightUpdate, member: EngineState, not_pushed: Sequence[str]
) -> None:
    if not member.tensors:
        return
    pushed = push.manifest.tensors
    try:
        check_push(
            Manifest({name: pushed[name] for name in pushed if name not in member.tied}),
            member.manifest,
            must_be_complete=contents is WeightUpdate.FULL,
            not_pushed=not_pushed,
        )
    except WeightMismatch as error:
        raise WeightMismatch(
            f"engine {member.engine_id}: {error}; nothing was sent",
            tensor=error.tensor,
            engine_id=member.engine_id,
        ) from None
