"""The pushes of one handle: made, shipped, sent, and freed when their call ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec

from rollout.config import ServerConfig
from rollout.control.server.server import RolloutServer
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.rules.canary import Logprobs
from rollout.runtime.calls.caller import Caller
from rollout.runtime.handle.push_builder import PushBuilder
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.weight_push import WeightPush

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors, NameMap

P = ParamSpec("P")


class ServerPushes:
    """The pushes of this process to one server; pickled, it has none of them.

    Attributes:
        builder: builds the pushes.
        expected: log-probs that go with the next push; see ``WeightChecks.expect``.
    """

    def __init__(self, config: ServerConfig, caller: Caller) -> None:
        self._config = config
        self._caller = caller
        self.builder = PushBuilder(config, caller)
        self.expected: Logprobs = ()

    def __reduce__(self) -> tuple[type[ServerPushes], tuple[ServerConfig, Caller]]:
        return ServerPushes, (self._config, self._caller)

    def push_of(
        self,
        named_tensors: NamedTensors | WeightPush,
        version: int | None,
        name_map: NameMap | None,
    ) -> WeightPush:
        """A new push of these tensors, or the existing push."""
        if isinstance(named_tensors, WeightPush):
            return named_tensors
        return self.builder.full(
            named_tensors, self.next_version(version), name_map=name_map, may_stream=True
        )

    def next_version(self, version: int | None) -> int:
        """This version; None is one more than the server's."""
        if version is not None:
            return checked_version(version)
        return self._caller.call(RolloutServer.status).result().weight_version + 1

    def send(
        self,
        method: Callable[Concatenate[RolloutServer, WeightPush, P], Awaitable[StepReport]],
        push: WeightPush,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[StepReport]:
        """Call this method of the server with the push, and free the push when the call ends."""
        pending = self._caller.call(method, self.shipped(push), *args, **kwargs)
        return self.builder.ended_with(pending, push)

    def shipped(self, push: WeightPush) -> WeightPush:
        """The push as the server gets it, with the log-probs that are expected of it."""
        return self._caller.ship(self.with_expected(push))

    def with_expected(self, push: WeightPush) -> WeightPush:
        """The push with the log-probs that are expected of it; the push after it has none."""
        expected, self.expected = self.expected, ()
        return replace(push, canary=expected) if expected else push

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether any tensor differs from the weights at ``model_path``."""
        return self.builder.base_differs(named_tensors)
