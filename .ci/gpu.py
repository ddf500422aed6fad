"""The tests and figures of a GPU, for a machine that is there for minutes and has no network.

    python .ci/gpu.py bundle TARGET --has FILE [--python 3.12]
    python .ci/gpu.py run [--seconds 465] [--only NAME ...] [--skip NAME ...] [--bundle FILE]

``bundle`` makes one file of what such a machine lacks, SGLang among it.  ``run`` unpacks it and
runs the sections of ``gpu_sections.py`` one after the other; without a bundle, with the packages of
this interpreter.  docs/gpu.md has both in full.  Neither needs more than Python's own library.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import gpu_bundle
import gpu_sections

ROOT = Path(__file__).parents[1]


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu.py", description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    bundle = verbs.add_parser("bundle", help="make the file for a machine without a network")
    bundle.add_argument("target", type=Path, help="the file, such as build/gpu/bundle.tar.xz")
    bundle.add_argument(
        "--has",
        type=Path,
        required=True,
        help="a text with the machine's packages: lines of `pip freeze`, or `Packages: a, b.`",
    )
    bundle.add_argument("--python", default="3.12", help="the machine's version of Python")
    run = verbs.add_parser("run", help="run the sections on this machine")
    run.add_argument("--bundle", type=Path, help="unpacked first; its packages come before others")
    run.add_argument("--out", type=Path, default=ROOT / "build/gpu/out", help="for the figures")
    run.add_argument("--seconds", type=float, default=465, help="of all sections together")
    names = [section.name for section in gpu_sections.SECTIONS]
    for option in ("--only", "--skip"):
        run.add_argument(option, nargs="+", default=[], choices=names, metavar="NAME")
    run.add_argument(
        "--rehearse", action="store_true", help="on a logical GPU, where there is no other"
    )
    return parser.parse_args(words)


def main() -> None:
    began = time.monotonic()
    arguments = parse(sys.argv[1:])
    if arguments.verb == "bundle":
        gpu_bundle.make(ROOT, arguments.target.resolve(), arguments.has, arguments.python)
        return
    site = gpu_bundle.unpack(arguments.bundle.resolve()) if arguments.bundle else None
    print(gpu_bundle.compile_bulk(ROOT, ROOT / "engines/tensors/_bulk.abi3.so"), flush=True)
    sections = [
        section
        for section in gpu_sections.SECTIONS
        if section.name not in arguments.skip
        and (not arguments.only or section.name in arguments.only)
    ]
    run = gpu_sections.Run(ROOT, arguments.out.resolve(), site, is_rehearsal=arguments.rehearse)
    sys.exit(run.all(sections, deadline=began + arguments.seconds))


if __name__ == "__main__":
    main()
