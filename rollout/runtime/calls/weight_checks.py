"""Checks that the engines hold the trainer's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout.config import ServerConfig
from rollout.control.engine.probe import check_expected, prompts_of
from rollout.control.server.server import RolloutServer
from rollout.core.errors import WeightMismatch
from rollout.core.pending import Pending
from rollout.core.types import StepReport
from rollout.rules.probe import Prompt
from rollout.runtime.calls.server_pushes import ServerPushes, needs_torch
from rollout.weights.push.push import Push

if TYPE_CHECKING:
    from rollout.weights.tensors import NamedTensors, NameMap


class WeightChecks:
    """``policy.checks``: whether the engines hold, or would get, the trainer's weights."""

    def __init__(self, config: ServerConfig, pushes: ServerPushes) -> None:
        self._config = config
        self._pushes = pushes

    @property
    def canary_prompts(self) -> tuple[Prompt, ...]:
        """Token ids of the prompts of the log-prob check."""
        return prompts_of(self._config.verify, self._config.model_path)

    def expect(self, logprobs: Sequence[Sequence[float]]) -> None:
        """Set the log-probs of the trainer's model for ``canary_prompts`` with the next push.

        Engines with other log-probs are fenced, even if their fingerprints are right.

        Args:
            logprobs: for each prompt, of its tokens after the first.
                ``rollout.canary_logprobs`` computes them with a transformers model.

        Raises:
            WeightMismatch: the numbers of prompts or tokens differ.
        """
        try:
            expected = tuple(tuple(map(float, values)) for values in logprobs)
        except (TypeError, ValueError) as error:
            raise WeightMismatch(f"log-probs are a list of floats per prompt: {error}") from None
        check_expected(expected, self.canary_prompts)
        self._pushes.server.logprobs = expected

    def push_path(
        self,
        named_tensors: NamedTensors | Push,
        *,
        version: int | None = None,
        name_map: NameMap | None = None,
    ) -> Pending[StepReport]:
        """Before the first push: check that a push arrives as the checkpoint does.

        The engines copy their weights in host memory, overwrite them with noise, get this push as
        any other, and compare.  An engine whose weights differ is fenced.

        Args:
            named_tensors: the weights of ``model_path``, as the trainer holds them.
            version: the version of this push; by default one more than the last.
            name_map: see ``ServerHandle.push``.

        Raises:
            LifecycleError: an engine cannot compare, or was pushed to; nothing was changed.
            PhaseFailed: weights differ; the message names them.
        """
        push = self._pushes.push_of(named_tensors, version, name_map)
        server = self._pushes.server
        return push.send(
            lambda weights: server.caller.call(
                RolloutServer.check_push_path, server.shipped(weights)
            )
        )

    def base_differs(self, named_tensors: NamedTensors) -> bool:
        """Whether any tensor differs from the weights at ``model_path``.

        Args:
            named_tensors: by checkpoint name, with the checkpoint's shapes.

        Raises:
            WeightMismatch: they do not fit the model.
        """
        with needs_torch():
            from rollout.weights.tensors.adapters import differs_from_checkpoint

        expected = self._pushes.server.expected
        return differs_from_checkpoint(named_tensors, self._config.model_path, expected)
