"""One reader under libFuzzer; ``python -m tools.fuzz`` starts it.

An input that breaks a rule is written down, once for each kind of message, and the search goes on.
Instrumented code is slow: the caller checks each such input again without.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["rollout", "engines"]):
    from tools.fuzz.reader import MOST_BYTES, MOST_CPU_S, Violation, check
    from tools.fuzz.readers import READERS

_SLOWER = 4
_SELDOM = 16
_MOST_KINDS = 200
_FIRST = 40


def main(name: str, found: Path, corpus: Path, arguments: list[str]) -> None:
    """Search until libFuzzer ends.

    Args:
        found: folder for inputs that break a rule.
        corpus: folder of the inputs that reach new code.
        arguments: of libFuzzer.
    """
    reader = READERS[name]
    kinds: set[str] = set()
    num = 0
    with atheris.instrument_imports(include=["rollout", "engines"]):
        for number, data in enumerate(reader.seeds()):
            if number < _FIRST or number % _SELDOM == 0:
                _write(corpus, data[:MOST_BYTES])
            if number < _FIRST:
                with suppress(Violation):  # it imports some modules with its first calls
                    check(reader, data[:MOST_BYTES], memory=False, splits=False)

    def test(data: bytes) -> None:
        nonlocal num
        num += 1
        is_chosen = num % _SELDOM == 0
        try:
            check(
                reader,
                data,
                most_cpu_s=_SLOWER * MOST_CPU_S,
                memory=is_chosen,
                splits=is_chosen or len(data) < _SELDOM**2,
            )
        except Violation as error:
            kind = re.sub(r"'.*|b\".*|[0-9]+", "", str(error))[:160]
            if kind not in kinds and len(kinds) < _MOST_KINDS:
                kinds.add(kind)
                _write(found, data, f"{name}-")
                print(f"found: {error}", file=sys.stderr, flush=True)

    limits = [f"-max_len={MOST_BYTES}", "-timeout=30", "-rss_limit_mb=4096"]
    atheris.Setup(
        [name, str(corpus), f"-artifact_prefix={found}/{name}-", *limits, *arguments], test
    )
    atheris.Fuzz()


def _write(folder: Path, data: bytes, prefix: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{prefix}{sha256(data).hexdigest()[:12]}").write_bytes(data)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
