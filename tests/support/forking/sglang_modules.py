"""What SGLang's server imports when it starts, for a fork server in its interpreter."""

from __future__ import annotations

import sglang.srt.entrypoints.http_server
import zmq
from sglang.srt.disaggregation.common.conn import CommonKVReceiver

from tests.support.forking import program


def make_context() -> None:
    """What the class makes when it is imported, which opens a file."""
    CommonKVReceiver._ctx = zmq.Context()


CommonKVReceiver._ctx.term()
program.PREPARATIONS.append(make_context)

__all__ = ["sglang"]
