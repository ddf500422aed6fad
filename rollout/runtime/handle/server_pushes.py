"""The pushes of one handle: made, shipped, sent, and freed when their call ends.

Always true: tensors are checked against the model's own list before anything is copied.  The
resources of a push in this process (slots, sockets, threads, a broadcast group) are freed when its
call ends, before the caller gets the result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from rollout.config import ServerConfig
from rollout.control.server.server import RolloutServer
from rollout.core.errors import WeightMismatch
from rollout.core.optional_deps import optional_import
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.rules.canary import Logprobs
from rollout.runtime.calls.caller import Caller
from rollout.runtime.handle.server_port import ServerCalls
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.weight_push import WeightPush

if TYPE_CHECKING:
    from rollout.weights.ranks.rank_push import LocalPush
    from rollout.weights.ranks.trainer_rank import TrainerRank
    from rollout.weights.routes.trainer_groups import IdleGroup
    from rollout.weights.tensors import NamedTensors, NameMap

P = ParamSpec("P")


def _torch() -> AbstractContextManager[None]:
    return optional_import("embedded", "pushing weights needs torch, which is not installed")


def check_name_map(name_map: object) -> None:
    """Raise WeightMismatch unless it is None or can be called."""
    if name_map is not None and not callable(name_map):
        raise WeightMismatch(f"name_map is a function, not a {type(name_map).__name__}")


class ServerPushes:
    """The pushes of this process to one server; pickled, it has none of them.

    Attributes:
        server: the calls of a push to it.
        expected: log-probs that go with the next push; see ``WeightChecks.expect``.
    """

    def __init__(self, config: ServerConfig, caller: Caller) -> None:
        self._config = config
        self._caller = caller
        self.server = ServerCalls(config, caller)
        self.expected: Logprobs = ()
        # By the identity of what the caller has: two pushes may have the same version.
        self._open: dict[int, LocalPush] = {}
        self._rank: TrainerRank | None = None
        self._idle_group: IdleGroup | None = None

    def __reduce__(self) -> tuple[type[ServerPushes], tuple[ServerConfig, Caller]]:
        return ServerPushes, (self._config, self._caller)

    # -- make -------------------------------------------------------------------------------

    def push_of(
        self,
        named_tensors: NamedTensors | WeightPush,
        version: int | None,
        name_map: NameMap | None,
    ) -> WeightPush:
        """A new push of these tensors, or the existing push."""
        if isinstance(named_tensors, WeightPush):
            return named_tensors
        return self.full(named_tensors, version, name_map=name_map, may_stream=True)

    @property
    def idle_group(self) -> IdleGroup:
        """The broadcast group of this process, also for its pushers; needs torch."""
        if self._idle_group is None:
            from rollout.weights.routes.trainer_groups import IdleGroup

            self._idle_group = IdleGroup()
        return self._idle_group

    def full(
        self,
        named_tensors: NamedTensors,
        version: int | None,
        *,
        name_map: NameMap | None = None,
        adapter: Mapping[str, Any] | None = None,
        is_base: bool = False,
        may_stream: bool,
    ) -> WeightPush:
        """A push of the model's tensors, all or some, or of an adapter.

        Args:
            adapter: of a LoRA adapter, its configuration.
            is_base: all base weights, also where ``update`` is ``lora``.
            may_stream: the tensors do not change until it has ended; else it is a copy of them.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        chosen = None if version is None else checked_version(version)
        check_name_map(name_map)
        with _torch():
            import_module("torch")  # what follows may have been loaded without it
            from rollout.weights.ranks.rank_push import LocalPush
            from rollout.weights.ranks.trainer_rank import TrainerRank
        if self._rank is None:
            self._rank = TrainerRank(self._config, idle_group=self.idle_group)
        made = LocalPush(
            self._rank,
            self.server,
            named_tensors,
            chosen,
            name_map=name_map,
            adapter=adapter,
            is_base=is_base,
            may_stream=may_stream,
        )
        self._open[id(made.push)] = made
        return made.push

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether these weights differ from the checkpoint that the engines load."""
        with _torch():
            from rollout.weights.tensors.adapters import differs_from_checkpoint

        return differs_from_checkpoint(named_tensors, self._config.model_path, self.server.expected)

    # -- send and end ------------------------------------------------------------------------

    def send(
        self,
        method: Callable[Concatenate[RolloutServer, WeightPush, P], Awaitable[StepReport]],
        push: WeightPush,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[StepReport]:
        """Call this method of the server with the push, and free the push when the call ends."""
        pending = self._caller.call(method, self.shipped(push), *args, **kwargs)
        return self.ended_with(pending, push)

    def shipped(self, push: WeightPush) -> WeightPush:
        """The push as the server gets it, with the log-probs that are expected of it."""
        return self._caller.ship(self.with_expected(push))

    def with_expected(self, push: WeightPush) -> WeightPush:
        """The push with the log-probs that are expected of it; the push after it has none."""
        expected, self.expected = self.expected, ()
        return replace(push, canary=expected) if expected else push

    def ended_with(self, pending: Pending[StepReport], push: WeightPush) -> Pending[StepReport]:
        """The same call; when it ends, the push's resources are freed."""

        def end() -> None:
            if (made := self._open.pop(id(push), None)) is not None:
                made.ended(pending)

        return pending.then(end)

    def end(self, push: WeightPush) -> None:
        """Free the resources of a push, if it has some here."""
        if (made := self._open.pop(id(push), None)) is not None:
            made.close()

    def close(self) -> None:
        """End all pushes, leave the broadcast group, and remove all files."""
        while self._open:
            self._open.popitem()[1].close()
        if self._rank is not None:
            self._rank.close()
            self._rank = None
        if self._idle_group is not None:
            self._idle_group.close()
            self._idle_group = None
