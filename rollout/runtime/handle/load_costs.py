"""Whether the engines of a server load a push in one call, because each load costs them."""

from __future__ import annotations

import logging
from functools import cached_property

from rollout.config import ServerConfig, Transport
from rollout.weights.format.checkpoint_config import read_checkpoint_config
from rollout.weights.push.transport_choice import loads_at_once, stream_note, why_loads_cost

logger = logging.getLogger(__name__)


class LoadCosts:
    """What loads cost the engines of one server; the reason is read and logged once."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._has_logged = False

    def is_at_once(self, transport: Transport) -> bool:
        """Whether all buckets of a push by this transport are loaded in one call."""
        settings = self._config.weights
        why = self._why
        at_once = loads_at_once(settings.transport, transport, why, streams=settings.stream)
        if not self._has_logged:
            self._has_logged = True
            if note := stream_note(settings.transport, why, streams=settings.stream):
                logger.warning("%s", note)
            elif at_once:
                logger.info("engines load all buckets of a push in one call: %s", why)
        return at_once

    @cached_property
    def _why(self) -> str:
        kinds = {group.engine.kind for group in self._config.groups.values()}
        return why_loads_cost(kinds, read_checkpoint_config(self._config.model_path))
