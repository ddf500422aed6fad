"""Starts ``sglang.launch_server`` with the keys of its environment.

A file, not a module: SGLang's interpreter may be one without this package.  Standard library only.
Always true: no command line, log or child's environment has a key.  SGLang writes all its settings
into its log, so they are taken out of what it logs.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from typing import Any

# Written out: see ``engines.http.key_check``.
KEYS = {"ENGINE_SAMPLING_KEY": "--api-key", "ENGINE_CONTROL_KEY": "--admin-api-key"}
HIDDEN = "(a key)"


def main() -> None:
    sys.path[0] = os.getcwd()  # as with ``-m``; the files beside this one are no modules of SGLang
    flags = {}
    for variable, flag in KEYS.items():
        key = os.environ.pop(variable, "")
        if key:
            flags[flag] = key
    hide(tuple(flags.values()))
    # In this process only: what ``ps`` shows is what the process was started with.
    sys.argv += [f"{flag}={key}" for flag, key in flags.items()]
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def hide(keys: tuple[str, ...]) -> None:
    """Take these out of everything that is logged from now on."""
    make = logging.getLogRecordFactory()

    def without_keys(*args: Any, **named: Any) -> logging.LogRecord:
        record = make(*args, **named)
        text = record.getMessage()
        if any(key in text for key in keys):
            for key in keys:
                text = text.replace(key, HIDDEN)
            record.msg, record.args = text, ()
        return record

    logging.setLogRecordFactory(without_keys)


if __name__ == "__main__":
    main()
