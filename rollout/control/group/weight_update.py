"""New weights for the engines of one group.

Always true: a push that does not fit an engine's own list of tensors is refused before anything is
sent.  From the first change until the end of a push, an engine has no weight version and is not
verified, so that half a push never serves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from engines.protocol.errors import EngineRejected
from rollout.config import WeightUpdate
from rollout.control.engine.group_settings import GroupSettings
from rollout.control.engine.state import EngineState
from rollout.control.group.engine_set import EngineSet
from rollout.core.errors import EngineFailure, WeightMismatch
from rollout.core.fanout import EngineReply
from rollout.rules.fingerprint_check import ALL_TENSORS, adapter_prefix
from rollout.weights.format.manifest import Manifest, check_push
from rollout.weights.push.weight_push import PushTarget, WeightPush, push_weights
from rollout.weights.routes.broadcast import process_text
from rollout.weights.store.weight_source import AdapterSource

logger = logging.getLogger(__name__)


class WeightUpdater:
    """Sends pushes to a group, and records their contents per engine.

    Attributes:
        adapters: restores the last pushed adapter on a restarted engine.
        fingerprints: of the tensors of the last push, if the trainer computed them.
    """

    def __init__(self, settings: GroupSettings, engines: EngineSet) -> None:
        self.adapters = AdapterSource()
        self.fingerprints: dict[str, str] = {}
        self._settings = settings
        self._engines = engines

    async def push(self, push: WeightPush) -> dict[str, EngineReply[None]]:
        """Send a push to every engine that is not fenced; replies by engine id.

        An engine that came after a push with several routes was planned waits for the next push.

        Raises:
            WeightMismatch: an engine has no such tensors, and nothing was sent; or all engines
            refused an adapter, and have the one from before.
            WeightsUnavailable: the trainer did not send what it announced.
        """
        members = [one for one in self._engines.unfenced() if push.route_of(one.engine_id)]
        contents = push.contents_under(self._settings.update)
        self.check(push)
        sent = self.fingerprints = {}
        groups = {member.engine_id: member.update_group for member in members}
        targets = {member.engine_id: _target(member) for member in members}
        before = [(member.weight_version, member.is_verified, member.changed) for member in members]
        try:
            answers = await push_weights(
                push,
                targets,
                budget_s=self._settings.lifecycle.update_timeout_s,
                reader=self._settings.name,
                on_begin=lambda: self.mark_changed(push),
                fingerprints=sent,
                groups=groups,
            )
        finally:
            for member in members:
                member.update_group = groups.get(member.engine_id, "")
        for member in self._engines.unfenced():
            if member not in members:
                logger.warning(
                    "engine %s came after the push of weight version %d was planned: it gets "
                    "requests after the next push",
                    member.engine_id,
                    push.version,
                )
                member.is_stale = True
        if why := await self._why_adapter_refused(push, answers, targets):
            for member, (version, is_verified, changed) in zip(members, before, strict=True):
                member.weight_version, member.is_verified = version, is_verified
                member.changed = changed
            raise WeightMismatch(why)
        copies = max((member.num_payloads for member in members), default=1)
        self.adapters.has_pushed(push, contents, copies)
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
            member.changed = frozenset(_outlast(member.changed, push)) | changed

    async def _why_adapter_refused(
        self,
        push: WeightPush,
        answers: Mapping[str, EngineReply[None]],
        targets: Mapping[str, PushTarget],
    ) -> str:
        """Why no engine takes an adapter, if all have the one from before again; else empty."""
        refusals = [answer.failure for answer in answers.values() if _is_refusal(answer.failure)]
        if not push.adapter or not 0 < len(refusals) == len(answers):
            return ""
        if not await self.adapters.reload(targets):
            return ""
        return (
            f"no engine of group {self._settings.name} takes the adapter of weight version "
            f"{push.version}; all keep the one from before: {refusals[0]}"
        )

    def _record_push(
        self, member: EngineState, push: WeightPush, contents: WeightUpdate, sent: Mapping[str, str]
    ) -> None:
        known = {} if contents is WeightUpdate.FULL else member.pushed
        member.pushed = {name: known[name] for name in _outlast(known, push)} | dict(sent)
        member.pushed_dtypes |= {
            name: tensor.dtype for name, tensor in push.manifest.tensors.items()
        }
        if contents is not WeightUpdate.LORA:
            member.base_version = push.version
        elif push.adapter:
            member.adapter = push.adapter
        adapter = member.adapter if contents is WeightUpdate.LORA else ""
        member.expected = {adapter: push.canary} if push.canary else {}
        is_whole = contents is WeightUpdate.FULL or (
            # The adapter needs the base weights on disk, unless other base weights were pushed.
            contents is WeightUpdate.LORA and self.adapters.base_version == 0
        )
        if is_whole or not member.is_stale:
            member.weight_version, member.is_stale = push.version, False


def _target(member: EngineState) -> PushTarget:
    return PushTarget(
        member.engine,
        member.num_payloads,
        member.has_session,
        process_text(member.process.processes),
        reports_groups=member.reports_groups,
        is_compared=member.has_checker and bool(member.fingerprint_method),
        host=member.host,
    )


def _outlast(known: Iterable[str], push: WeightPush) -> list[str]:
    """The tensors that a push does not replace: a new adapter replaces all of the one before."""
    replaced = (adapter_prefix(push.adapter),) if push.adapter else ()
    return [
        name
        for name in known
        if name not in push.manifest.tensors and not name.startswith(replaced)
    ]


def _is_refusal(failure: EngineFailure | None) -> bool:
    return failure is not None and isinstance(failure.__cause__, EngineRejected)


def _check(
    push: WeightPush, contents: WeightUpdate, member: EngineState, not_pushed: Sequence[str]
) -> None:
    if contents is WeightUpdate.LORA or not member.tensors:
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
