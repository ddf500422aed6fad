"""New weights for the engines of one group.

Always true: what does not fit an engine's own list of tensors is refused before anything is sent;
from the first change on an engine counts as holding no version and as unproved, until it has
taken all of a push, so that half of one never serves.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout.config import WeightUpdate
from rollout.errors import WeightMismatch
from rollout.fanout import Answer
from rollout.group_settings import GroupSettings
from rollout.member import Member
from rollout.roster import Roster
from rollout.verification import ALL_TENSORS
from rollout.weights.joining import process_text
from rollout.weights.manifest import Manifest, check_push
from rollout.weights.push import PushTarget, WeightPush, push_weights
from rollout.weights.source import AdapterSource
from rollout.weights.transports.as_adapter import AsAdapter


class Updating:
    """Pushes to a group, and what is known of the last ones.

    Attributes:
        adapters: gives a restarted engine the last adapter; it has none before the first.
    """

    def __init__(self, settings: GroupSettings, roster: Roster) -> None:
        self.adapters = AdapterSource()
        self._settings = settings
        self._roster = roster

    async def push(self, push: WeightPush) -> dict[str, Answer[None]]:
        """Send it to every engine that is not fenced; answers by engine id.

        Raises:
            WeightMismatch: an engine has no such tensors; nothing was sent.
            WeightsUnavailable: the trainer did not bring what it announced.
        """
        members = self._roster.unfenced()
        contents = push.contents_under(self._settings.update)
        for member in members:
            _check(push, contents, member)
        sent: dict[str, str] = {}

        def has_begun() -> None:
            for member in members:
                member.weight_version = None
                member.is_proved = False
                member.changed |= _changed_by(push, contents)

        held = {member.engine_id: member.update_group for member in members}
        try:
            answers = await push_weights(
                push,
                {member.engine_id: _target(member) for member in members},
                budget_s=self._settings.lifecycle.update_timeout_s,
                reader=self._settings.name,
                on_begin=has_begun,
                fingerprints=sent,
                held=held,
            )
        finally:
            for member in members:
                member.update_group = held.get(member.engine_id, "")
        copies = max((member.num_payloads for member in members), default=1)
        self.adapters.has_pushed(push, contents, copies)
        for member in members:
            if answers[member.engine_id].failure is None:
                self._has_taken(member, push, contents, sent)
        return answers

    def _has_taken(
        self, member: Member, push: WeightPush, contents: WeightUpdate, sent: Mapping[str, str]
    ) -> None:
        known = {} if contents is WeightUpdate.FULL else member.pushed
        kept = {name: one for name, one in known.items() if name not in push.manifest.tensors}
        member.pushed = kept | dict(sent)
        member.pushed_dtypes |= {name: one.dtype for name, one in push.manifest.tensors.items()}
        if contents is not WeightUpdate.LORA:
            member.base_version = push.version
        elif isinstance(push.carrier, AsAdapter):
            member.adapter = push.carrier.name
        of = member.adapter if contents is WeightUpdate.LORA else ""
        member.expected = {of: push.canary} if push.canary else {}
        is_whole = contents is WeightUpdate.FULL or (
            # The base on disk is the one under the adapter unless another was pushed.
            contents is WeightUpdate.LORA and self.adapters.base_version == 0
        )
        if is_whole or not member.is_stale:
            member.weight_version, member.is_stale = push.version, False


def _target(member: Member) -> PushTarget:
    return PushTarget(
        member.engine,
        member.num_payloads,
        member.has_session,
        process_text(member.process.processes),
        member.takes_flat_broadcast,
        member.tells_groups,
    )


def _changed_by(push: WeightPush, contents: WeightUpdate) -> frozenset[str]:
    is_full = contents is WeightUpdate.FULL
    return ALL_TENSORS if is_full else frozenset(push.manifest.tensors)


def _check(push: WeightPush, contents: WeightUpdate, member: Member) -> None:
    if contents is WeightUpdate.LORA or not member.tensors:
        return
    try:
        check_push(
            Manifest({n: one for n, one in push.manifest.tensors.items() if n not in member.tied}),
            member.manifest,
            must_be_complete=contents is WeightUpdate.FULL,
        )
    except WeightMismatch as error:
        raise WeightMismatch(
            f"engine {member.engine_id}: {error}; nothing was sent",
            tensor=error.tensor,
            engine_id=member.engine_id,
        ) from None
