"""The servers of a run, for any process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollout.runtime.handle.server_handle import ServerHandle


class RunHandle(Mapping[str, ServerHandle]):
    """The servers of a run, by name.  It owns nothing, and can be pickled."""

    def __init__(self, servers: Mapping[str, ServerHandle]) -> None:
        self._servers = dict(servers)

    def __getitem__(self, name: str) -> ServerHandle:
        """The server of that name.

        Args:
            name: as in ``servers`` of the configuration.

        Raises:
            KeyError: there is none; the error names those that there are.
        """
        if name not in self._servers:
            known = ", ".join(self._servers) or "no server"
            raise KeyError(f"no server {name!r}; this run has {known}")
        return self._servers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._servers)

    def __len__(self) -> int:
        return len(self._servers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self._servers.values())})"

    def __reduce__(self) -> tuple[type[RunHandle], tuple[dict[str, ServerHandle]]]:
        return RunHandle, (self._servers,)
