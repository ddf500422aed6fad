"""What a request learns of its reply, kept for a test."""

from __future__ import annotations


class Handler:
    """What a request learns of its reply."""

    def __init__(self, is_decoding):
        self.is_decoding = is_decoding
        self.upstream = None
        self.pieces = []
        self.end = None

    def on_reply(self, head, length, unread, is_alone):
        assert head.status == 200

    def on_reply_data(self, data, is_end):
        assert self.end is None
        self.pieces.append(bytes(data))
        if is_end:
            self.end = "end"

    def on_engine_lost(self, why, *, was_sent=True):
        assert self.end is None
        self.end = why

    def may_reconnect(self):
        return False

    def on_router_error(self, error):
        raise error
