"""A server with the HTTP API of the Hugging Face Hub, as far as a download uses it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = hashlib.sha1(b"a commit").hexdigest()


@dataclass
class Hub:
    """A Hub with one model, of one commit.

    Attributes:
        requests: what was requested, as ``METHOD path``.
    """

    url: str
    repo: str
    files: Mapping[str, bytes]
    requests: list[str] = field(default_factory=list)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path."""
        path = path.partition("?")[0]
        if path.startswith("/api/models/tiny/gated/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if path in (f"/api/models/{self.repo}/revision/{name}" for name in ("main", "v1", COMMIT)):
            names = [{"rfilename": name} for name in self.files]
            return 200, {}, json.dumps({"id": self.repo, "sha": COMMIT, "siblings": names}).encode()
        if path.startswith(f"/api/models/{self.repo}/revision/"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if path == f"/api/models/{self.repo}/tree/{COMMIT}":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in self.files.items()
            ]
            return 200, {}, json.dumps(entries).encode()
        name = path.removeprefix(f"/{self.repo}/resolve/{COMMIT}/")
        if name in self.files:
            content = self.files[name]
            return 200, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}, content
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serving(repo: str, files: Mapping[str, bytes]) -> Iterator[Hub]:
    """A Hub on this machine; it ends with the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(has_body=False)

        def do_GET(self) -> None:
            self._answer(has_body=True)

        def _answer(self, *, has_body: bool) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            status, headers, body = hub.answer(self.path)
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            if has_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(f"http://127.0.0.1:{server.server_port}", repo, files)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
