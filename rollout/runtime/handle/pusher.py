"""A push by every rank of a trainer, see ``rollout.weights.ranks``."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rollout.core.arguments import RankTimeout, checked, wrong_type
from rollout.core.errors import RolloutError
from rollout.core.types import StepReport
from rollout.runtime.calls.server_port import ServerCalls
from rollout.runtime.handle.offload_window import BeforeKv, check_before_kv
from rollout.weights.push.push import PushRequest
from rollout.weights.ranks.link import RankLink
from rollout.weights.ranks.messages import EnginesNotNeeded
from rollout.weights.ranks.protocol import PushRound
from rollout.weights.ranks.rank_push import RankOffload, RankPush
from rollout.weights.ranks.trainer_rank import TrainerRank
from rollout.weights.routes.trainer_groups import IdleGroup
from rollout.weights.tensors import Dtype, NamedTensors, NameMap

# Messages of so many pushes and offloads stay for ranks that are late.
_ROUNDS_REMEMBERED = 4

_SHARE_OF_ENGINES = 0.9


class Pusher:
    """Pushes a trainer's weights from all of its ranks; ``ServerHandle.pusher`` makes it.

    Every rank calls ``push`` with the same arguments, and gets the same report or the same error.
    If a rank leaves its ``with`` block with an error, the next call of the others ends with it.

    Args:
        server: the calls of a push to its server, which the handle makes, too.
        timeout_s: for a rank that is silent, see ``ranks.protocol``; less if the engines wait less
            for a bucket, so that the error names the rank.
        idle_group: of all pushes of the handle.
    """

    def __init__(
        self,
        server: ServerCalls,
        link: RankLink,
        *,
        timeout_s: float,
        idle_group: IdleGroup | None = None,
    ) -> None:
        config = server.config
        self.link = link
        self.server = server
        hosts = link.hosts(config.weights.shared_memory_path)
        self.rank = TrainerRank(config, link.rank, hosts, idle_group)
        self._timeout_s = min(timeout_s, _SHARE_OF_ENGINES * config.lifecycle.update_timeout_s)
        self._is_closed = False
        self._num_rounds = 0
        self._keys_left: list[tuple[str, ...]] = []

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed else ""
        return f"Pusher(rank {self.link.rank} of {self.link.num_ranks}{state})"

    def push(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
        dtype: Dtype | None = None,
        before_kv: BeforeKv | None = None,
        adapter: Mapping[str, Any] | None = None,
        is_base: bool = False,
        adapter_name: str = "",
    ) -> StepReport:
        """``ServerHandle.push`` from all ranks: these weights, verified and serving.

        In whatever phase the engines are: released memory is resumed, serving ones are paused.

        Args:
            named_tensors: the same names on every rank: whole tensors, or DTensors, which are
                gathered here.  An iterator is consumed bucket by bucket: it yields whole tensors,
                in the same order on every rank, and may gather them itself.
            version: the new weight version; by default one more than the server's.
            name_map: see ``ServerHandle.push``.
            dtype: of float tensors, which are cast before they are gathered.
            before_kv: frees memory of this rank that the KV caches need.  It runs on every rank
                that gives one, after the engines have verified the weights; the KV caches are
                resumed after it has run on all.  It has as long as a rank may be silent.  If it
                raises, so does the push on all ranks: the engines hold the new weights and do not
                serve, and ``serve()`` continues.  If the engines were not offloaded, it runs
                after the push, while they serve.
            adapter: with ``update: lora``, of a LoRA adapter with PEFT's names: PEFT's
                ``adapter_config.json`` or ``config.to_dict()``.
            is_base: with ``update: lora``: these are all base weights, or base and adapter
                ``merged``.
            adapter_name: which of ``weights.adapters`` it is, where there are several.

        Raises:
            TypeError, ValueError: an argument is wrong; the other ranks find this one silent.
            WeightMismatch: the tensors do not fit the model, or differ between ranks.
            RankFailure: a rank failed, or is silent.  The error of a single rank goes up as it is.
            RolloutError: the pusher is closed.
        """
        # A rank whose argument is wrong has called, too: its next call is the others' next one.
        round_ = self._round("push")
        check_before_kv(before_kv)
        request = PushRequest(
            named_tensors, version, name_map, dtype, adapter, is_base, adapter_name
        )
        return self._push(round_, request, before_kv=before_kv)

    def check_push_path(
        self,
        named_tensors: NamedTensors,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
        dtype: Dtype | None = None,
    ) -> StepReport:
        """Before the first push: ``policy.checks.push_path`` from all ranks.

        Args:
            named_tensors: the weights of ``model_path``, as the ranks hold them.
            version, name_map, dtype: see ``push``.

        Raises:
            LifecycleError: an engine cannot compare, or was pushed to; nothing was changed.
            PhaseFailed: weights differ; the message names them.
            TypeError, ValueError, WeightMismatch, RankFailure, RolloutError: as ``push``.
        """
        round_ = self._round("push")
        request = PushRequest(named_tensors, version, name_map, dtype)
        return self._push(round_, request, checks_path=True)

    def _push(
        self,
        round_: PushRound,
        request: PushRequest,
        *,
        before_kv: BeforeKv | None = None,
        checks_path: bool = False,
    ) -> StepReport:
        if not isinstance(request.dtype, Dtype | None):
            raise wrong_type("dtype", request.dtype, "a torch.dtype such as torch.bfloat16")
        link = self.link
        try:
            with RankPush(
                self.rank,
                self.server,
                request,
                before_kv=before_kv,
                checks_path=checks_path,
                timeout_s=self._timeout_s,
            ) as push:
                steps = round_.follow(push.ready) if link.rank else round_.lead(push.ready)
                report = link.run(steps, push.do)
                push.complete()
        finally:
            self._forget(round_)
        return report

    @checked
    def offload(self, *, rank_timeout_s: RankTimeout | None = None) -> StepReport:
        """Free the engines' memory for the trainer, as ``ServerHandle.offload``.

        Every rank calls it when it needs the engines no more.  Rank 0 offloads when all have, and
        all return when the memory is free.

        Args:
            rank_timeout_s: how long the ranks wait for the last one; by default as in a push.  Name
                it if the ranks generate samples, which takes some longer than others.

        Raises:
            TypeError, ValueError: ``rank_timeout_s`` is wrong.
            RankFailure: a rank is silent; nothing was offloaded, unless that is rank 0.
            RolloutError: the pusher is closed.
        """
        link, round_ = self.link, self._round("offload", rank_timeout_s)
        work = RankOffload(self.server.offload)
        try:
            own = EnginesNotNeeded()
            steps = round_.follow(own) if link.rank else round_.lead(own)
            report = link.run(steps, work.do)
        finally:
            self._forget(round_)
        return report

    def _round(self, call: str, timeout_s: float | None = None) -> PushRound:
        """The next call of all ranks, which no call of another name can join.

        Raises:
            RolloutError: the pusher is closed.
        """
        if self._is_closed:
            raise RolloutError("this pusher is closed; policy.pusher() makes another, on all ranks")
        self._num_rounds += 1
        link = self.link
        name = f"{call}-{self._num_rounds}"
        return PushRound(name, link.rank, link.num_ranks, timeout_s or self._timeout_s, call)

    def close(self) -> None:
        """Free this rank's shared memory, for good, and leave the broadcast group."""
        self._is_closed = True
        self.rank.close()

    def __enter__(self) -> Pusher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        if error is not None and not self._is_closed:
            self._leave(error)
        self.close()

    def _leave(self, error: BaseException) -> None:
        """Report it to the other ranks, which would wait for this one in their next call."""
        for call in ("push", "offload"):
            round_ = self._round(call)
            self._num_rounds -= 1  # it is the same call, whatever its name
            with suppress(Exception):
                self.link.run(round_.leave(error), lambda step: None)

    def _forget(self, round_: PushRound) -> None:
        """Delete the messages of earlier calls."""
        self._keys_left.append(round_.keys_left())
        if len(self._keys_left) > _ROUNDS_REMEMBERED:
            keys = self._keys_left.pop(0)
            if self.link.rank == 0 and self.link.texts is not None:
                self.link.texts.delete(keys)
