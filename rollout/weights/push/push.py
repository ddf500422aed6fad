"""A push in the process that made it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from rollout.config import WeightUpdate
from rollout.core.errors import LifecycleError, RolloutError, WeightMismatch
from rollout.core.pending import Pending
from rollout.core.types import PushStage, StepReport
from rollout.weights.push.push_version import checked_version
from rollout.weights.push.weight_push import WeightPush, default_contents

if TYPE_CHECKING:
    from rollout.weights.tensors import Dtype, NamedTensors, NameMap

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PushRequest:
    """What a caller pushes.

    Attributes:
        version: None: one more than the server's.
        name_map: from the trainer's tensors to the checkpoint's.
        dtype: dtype of float tensors, which are cast before they are gathered.
        adapter: configuration of a LoRA adapter.
        adapter_name: which of ``weights.adapters``, or empty where there is one.
        is_base: all base weights, also where ``update`` is ``lora``.

    Raises:
        WeightMismatch: the version is none, or ``name_map`` cannot be called.
    """

    named_tensors: NamedTensors
    version: int | None = None
    name_map: NameMap | None = None
    dtype: Dtype | None = None
    adapter: Mapping[str, Any] | None = None
    is_base: bool = False
    adapter_name: str = ""

    def __post_init__(self) -> None:
        if self.version is not None:
            object.__setattr__(self, "version", checked_version(self.version))
        if self.name_map is not None and not callable(self.name_map):
            raise WeightMismatch(f"name_map is a function, not a {type(self.name_map).__name__}")

    def contents(self, update: WeightUpdate) -> WeightUpdate:
        """The part of the model that is pushed to a server with this ``weights.update``.

        Raises:
            WeightMismatch: the server takes no adapters, or this is no adapter's configuration.
        """
        if self.adapter is None:
            return WeightUpdate.FULL if self.is_base else default_contents(update)
        if update is not WeightUpdate.LORA:
            raise WeightMismatch(f"weights.update is {update}: adapters need lora")
        if self.is_base or not isinstance(self.adapter, Mapping):
            wrong = "with is_base" if self.is_base else f"not {self.adapter!r:.80}"
            raise WeightMismatch(
                "an adapter's config is the mapping in adapter_config.json, or PEFT's "
                f"config.to_dict(), {wrong}"
            )
        return WeightUpdate.LORA

    def adapter_of(self, names: Sequence[str]) -> str:
        """Which of ``weights.adapters`` is pushed.

        Raises:
            WeightMismatch: it is none of them, or the push does not say which.
        """
        if (name := self.adapter_name or "".join(names[: len(names) == 1])) in names:
            return name
        raise WeightMismatch(
            f"adapter_name = {self.adapter_name!r}: weights.adapters has {', '.join(names)}; name "
            "one of them"
        )


class Push:
    """New weights for one server: what the server gets, and all that they hold in this process.

    ``policy.phases.make_push`` makes it.  It is sent once, and closed when that call ends, before
    the caller has the result.  ``with`` closes it, too.

    Args:
        resources: resources of this process; closed with the push, in any state.
        after_success: called when the call that sent it has succeeded; returns its stages.

    Attributes:
        weights: what the server gets.
    """

    def __init__(
        self,
        weights: WeightPush,
        resources: ExitStack | None = None,
        after_success: Callable[[], Sequence[PushStage]] = tuple,
    ) -> None:
        self.weights = weights
        self._after_success = after_success
        self._lock = threading.Lock()
        self._resources: ExitStack | None = resources or ExitStack()

    @property
    def version(self) -> int:
        """The weight version that the engines have after it."""
        return self.weights.version

    @property
    def is_closed(self) -> bool:
        """Whether it holds nothing any more, and cannot be sent."""
        return self._resources is None

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"Push(version {self.version}{state})"

    def __reduce__(self) -> NoReturn:
        raise RolloutError(f"{self!r} belongs to the process that made it: send it there")

    def send(self, begin: Callable[[WeightPush], Pending[StepReport]]) -> Pending[StepReport]:
        """The call that ``begin`` begins with these weights; the push is closed when it ends.

        The report gets the stages of the push, but not that of an ``object_ref``.

        Args:
            begin: begins the call with what the server gets.

        Raises:
            LifecycleError: it was closed, as a call that sent it does.
        """
        return send_all(
            {"": self},
            lambda weights: begin(weights[""]),
            lambda report, stages: replace(report, push_stages=tuple(stages[""])),
        )

    def _check_open(self) -> None:
        if self.is_closed:
            raise LifecycleError(
                f"{self!r} was sent or closed, so its tensors may be gone: make another",
                command="push",
            )

    def close(self) -> None:
        """Free all that it holds in this process, in any state, from any thread."""
        with self._lock:
            resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()

    def __enter__(self) -> Push:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


Stages = Mapping[str, Sequence[PushStage]]
"""Name of a push -> its stages."""


def send_all(
    pushes: Mapping[str, Push],
    begin: Callable[[Mapping[str, WeightPush]], Pending[T]],
    with_stages: Callable[[T, Stages], T],
) -> Pending[T]:
    """The one call that ``begin`` begins with all pushes; they are closed when it ends.

    Args:
        with_stages: its result with the stages of all pushes.

    Raises:
        LifecycleError: one was closed, as a call that sent it does; nothing was sent.
    """

    stages: dict[str, Sequence[PushStage]] = dict.fromkeys(pushes, ())

    def close() -> None:
        for push in pushes.values():
            push.close()

    def end() -> None:
        close()
        with suppress(Exception):  # a failed push is not kept
            pending.result(0)
            for name, push in pushes.items():
                stages[name] = push._after_success()

    try:
        for push in pushes.values():
            push._check_open()
        pending = begin({name: push.weights for name, push in pushes.items()})
    except BaseException:
        close()
        raise
    return pending.then(end, lambda result: with_stages(result, stages))
