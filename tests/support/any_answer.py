"""A program that answers 200 to everything: an old engine of others, for instance."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _AnyAnswer(BaseHTTPRequestHandler):
    requests: list[str]

    def do_GET(self) -> None:
        self.requests.append(self.path)
        body = (
            b'{"status": "ok", "weight_version": "0", "model_path": "/models/other",'
            b' "text": "mine", "meta_info": {}}'
        )
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def any_answer_at(host: str, port: int, requests: list[str]) -> ThreadingHTTPServer:
    """Such a program at this address; the paths of what it gets are added to ``requests``."""
    handler = type("Handler", (_AnyAnswer,), {"requests": requests})
    server = ThreadingHTTPServer((host, port), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
