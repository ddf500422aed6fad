"""How a call makes a push of the trainer's tensors and sends it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol

from rollout.control.server.server import RolloutServer
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.rules.canary import Logprobs
from rollout.weights.push.weight_push import WeightPush

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors, NameMap

P = ParamSpec("P")


class PushCalls(Protocol):
    """The pushes of one process to one server.

    Attributes:
        expected: the log-probs for the next push.
    """

    expected: Logprobs

    def push_of(
        self,
        named_tensors: NamedTensors | WeightPush,
        version: int | None,
        name_map: NameMap | None,
    ) -> WeightPush:
        """A new push of these tensors, or the existing push."""
        ...

    def send(
        self,
        method: Callable[Concatenate[RolloutServer, WeightPush, P], Awaitable[StepReport]],
        push: WeightPush,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Pending[StepReport]:
        """Call this method of the server with the push, and free the push when the call ends."""
        ...

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether any tensor differs from the weights at ``model_path``."""
        ...
