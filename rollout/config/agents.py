"""Settings of a server's agents: the processes that take chats, and keep exact token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rollout.config.base import ConfigSection, Seconds

_LAST_PORT = 65535


class AgentsConfig(ConfigSection):
    """Sessions of agents: OpenAI's chats, whose turns keep their exact token ids.

    The keys of clients are those of the router.
    """

    workers: Annotated[int, Field(ge=0, le=64)] = 1
    """Processes that take chats; a session stays with one of them. 0: there are no sessions."""
    host: str = ""
    """Address to bind. Default: that of the router."""
    port: Annotated[int, Field(ge=0, le=_LAST_PORT)] = 0
    """Port of the first worker, the others have those behind it; 0 takes free ports, which
    ``rollout status`` shows."""
    session_ttl_s: Seconds = 3600.0
    """A session without requests for this long is removed, with its turns."""
    max_sessions: Annotated[int, Field(ge=1)] = 100_000
    """Most sessions that a worker keeps. Beyond it, a new one is refused."""
    max_session_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Most bytes of the turns of all sessions of a worker; beyond it, a further turn is refused."""
    tokenizer_path: str = ""
    """Folder with tokenizer and chat template. Default: ``router.tokenizer_path``, or else the
    folder that the engines name."""
    renderer: str = "auto"
    """How messages become token ids: a name of the package ``renderers``, such as ``qwen3``.
    ``auto``: the one of the model's family; its chat template where there is none."""
    tool_call_parser: Literal[
        "auto",
        "hermes",
        "mistral",
        "llama3_json",
        "qwen3_coder",
        "glm45",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "harmony",
    ] = "auto"
    """The form of the model's tool calls. ``auto``: the one that its chat template shows;
    ``hermes`` if it shows none."""

    @property
    def ports(self) -> list[int]:
        """The ports of its workers, by their numbers; 0 for a free one."""
        return [self.port + number if self.port else 0 for number in range(self.workers)]

    def conflicts(self) -> Iterator[tuple[str, str]]:
        if max(self.ports, default=0) > _LAST_PORT:
            last = _LAST_PORT - self.workers + 1
            yield "port", f"{self.workers} workers need ports behind it: at most {last}"
