"""Pictures of the pages as SVG: no script, and nothing from another host.

``python docs/pictures.py`` writes the picture of the rooms.

Always true: the pictures of the lifecycle and of the rooms are drawn from the code, and have every
phase and every folder; the picture of the modes has every mode.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import get_args

from rollout.driver.stream.options import Mode
from rollout.rules import lifecycle

ROOT = Path(__file__).parents[1]
_BOX = 'fill="none" stroke="currentColor" stroke-width="1.5" rx="5"'
_LINE = 'fill="none" stroke="currentColor" stroke-width="1.2"'
_HEAD = (
    '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    ' orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="currentColor"/></marker></defs>'
)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    return (
        f'<figure><svg viewBox="0 0 {width} {height}" width="{width}" style="max-width: 100%" '
        f'role="img" aria-label="{escape(title)}" font-family="inherit" fill="currentColor">\n'
        f"{_HEAD}\n{body}\n</svg></figure>"
    )


def _box(left: float, top: float, width: float, height: float, text: str, title: str = "") -> str:
    hover = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<g>{hover}<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" {_BOX}/>'
        f'<text x="{left + width / 2:g}" y="{top + height / 2 + 5:g}" text-anchor="middle" '
        f'font-size="14">{escape(text)}</text></g>'
    )


def _words(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="12">{escape(text)}</text>'


def _arrow(path: str) -> str:
    return f'<path d="{path}" {_LINE} marker-end="url(#head)"/>'


# -- the lifecycle --------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _PITCH, _LEFT = 150, 30, 62, 340
_LANE = 105


def lifecycle_picture() -> str:
    """The phases from top to bottom; commands that skip phases share a lane beside them."""
    phases = [phase for phase in lifecycle.Phase if phase is not lifecycle.Phase.STARTING]
    top = {phase: 10 + _PITCH * row for row, phase in enumerate(phases)}
    parts = [_box(_LEFT, top[phase], _WIDTH, _HEIGHT, phase) for phase in phases]
    middle, loops, left, right = _LEFT + _WIDTH / 2, [], [], []
    for row in lifecycle.TABLE:
        down = phases.index(row.target) - phases.index(row.phase)
        if down == 1:
            y = top[row.phase] + _HEIGHT
            parts.append(_arrow(f"M{middle:g},{y:g} V{top[row.target]:g}"))
            parts.append(_words(middle + 8, y + 20, row.command, "start"))
        elif down:
            (right if down > 0 else left).append(row)
        else:
            loops.append(row)
    for row in loops:
        y, x = top[row.phase], _LEFT + _WIDTH - 12
        parts.append(_arrow(f"M{x:g},{y:g} v-9 h26 v24 h-14"))
        parts.append(_words(x + 30, y, row.command, "start"))
    parts += _lanes(left, top, _LEFT, -1)
    parts += _lanes(right, top, _LEFT + _WIDTH, 1)
    height = top[phases[-1]] + _HEIGHT + 10
    return _svg(800, int(height), "phases and commands of a group", parts)


def _lanes(
    rows: Sequence[lifecycle.Transition],
    top: Mapping[lifecycle.Phase, float],
    edge: float,
    side: int,
) -> Iterator[str]:
    """One vertical line for all rows of one command with one target, the shortest innermost."""

    def end(row: lifecycle.Transition) -> tuple[float, str]:
        return top[row.target], row.command

    lanes = [list(found) for _, found in groupby(sorted(rows, key=end), key=end)]
    lanes.sort(key=lambda lane: max(abs(top[row.phase] - top[row.target]) for row in lane))
    for number, lane in enumerate(lanes, start=1):
        x, target = edge + side * _LANE * (number if side < 0 else number + 0.4), lane[0].target
        into = top[target] + _HEIGHT / 2 + side * 5
        for row in lane:
            y = top[row.phase] + _HEIGHT / 2 - side * 5
            yield _arrow(f"M{edge:g},{y:g} H{x:g} V{into:g} H{edge:g}")
        # Over the highest of its horizontal lines.
        highest = min(into, *(top[row.phase] + _HEIGHT / 2 - side * 5 for row in lane))
        yield _words(x - side * 5, highest - 4, lane[0].command, "start" if side < 0 else "end")


# -- the processes --------------------------------------------------------------------------------

# Name, what it has, and the left upper corner of its box.
_PROCESSES = {
    "script": ("training script", "trainer, driver, handles", 10, 10),
    "clients": ("other clients", "agents, OpenAI's API", 550, 10),
    "server": ("server", "groups, lifecycle, page", 10, 120),
    "router": ("router", "gate, requests in flight", 280, 120),
    "agents": ("workers of agents", "chats of sessions", 550, 120),
    "guard": ("guard of an engine", "ends it with its owner", 10, 230),
    "engine": ("engine", "weights, KV cache", 280, 230),
    "store": ("agent of the weight store", "published weights in memory", 550, 230),
}
_ROOM = (200, 48)
# From, to, and the words beside the arrow.
_CALLS = (
    ("script", "server", "commands"),
    ("script", "router", "requests"),
    ("clients", "agents", "chats"),
    ("clients", "router", "requests"),
    ("agents", "router", "token ids"),
    ("server", "router", "gate"),
    ("server", "engine", "commands"),
    ("server", "guard", "start, kill"),
    ("router", "engine", "requests"),
    ("guard", "engine", "ends it"),
    ("store", "engine", "weights"),
)


def processes_picture() -> str:
    """The processes of one server with one engine, and who calls which."""
    width, height = _ROOM
    parts = []
    for name, about, left, top in _PROCESSES.values():
        parts.append(_box(left, top, width, height, ""))
        parts.append(_words(left + width / 2, top + 20, name, "middle"))
        parts.append(_words(left + width / 2, top + 38, about, "middle"))
    for caller, called, words in _CALLS:
        _, _, x, y = _PROCESSES[caller]
        _, _, to_x, to_y = _PROCESSES[called]
        if y == to_y:
            begin, end = (x + width, to_x) if to_x > x else (x, to_x + width)
            parts.append(_arrow(f"M{begin},{y + height / 2:g} H{end}"))
            parts.append(_words((begin + end) / 2, y + height / 2 - 6, words, "middle"))
        else:
            begin, end = x + width / 2, to_x + width / 2
            shift = 0 if x == to_x else (60 if to_x > x else -60)
            parts.append(_arrow(f"M{begin + shift:g},{y + height} L{end - shift:g},{to_y}"))
            parts.append(_words((begin + end) / 2 + 16, (y + height + to_y) / 2, words, "start"))
    return _svg(760, 290, "the processes of a run, and who calls which", parts)


# -- the modes of the driver ----------------------------------------------------------------------

_STEP, _BAR = 90, 22
# For each mode, what engines and trainer do over time: words, begin and end in steps.
_MODES: Mapping[Mode, tuple[Sequence[tuple[str, float, float]], ...]] = {
    "sync": (
        (("batch 1", 0, 2), ("batch 2", 3, 5), ("batch 3", 6, 7)),
        (("train 1", 2, 3), ("train 2", 5, 6)),
    ),
    "one_ahead": (
        (("batch 1", 0, 2), ("batch 2", 2, 4), ("batch 3", 4, 6), ("4", 6, 7)),
        (("train 1", 2, 3), ("train 2", 4, 5), ("train 3", 6, 7)),
    ),
    "async": (
        (("requests run all the time; each token has the version that drew it", 0, 7),),
        (("1", 2, 3), ("2", 3, 4), ("3", 4, 5), ("4", 5, 6), ("5", 6, 7)),
    ),
}


def modes_picture() -> str:
    """Two lanes for each mode of the driver: the engines above, the trainer below."""
    assert set(_MODES) == set(get_args(Mode))
    parts, left = [], 160
    for row, (mode, lanes) in enumerate(_MODES.items()):
        top = 10 + 76 * row
        parts.append(_words(4, top + 30, mode, "start"))
        for place, (name, lane) in enumerate(zip(("engines", "trainer"), lanes, strict=True)):
            y = top + place * (_BAR + 6)
            parts.append(_words(left - 8, y + 16, name, "end"))
            for words, begin, end in lane:
                x, width = left + begin * _STEP, (end - begin) * _STEP - 4
                parts.append(_box(x, y, width, _BAR, ""))
                parts.append(_words(x + width / 2, y + 16, words, "middle"))
    return _svg(left + 7 * _STEP, 76 * len(_MODES) + 4, "the modes of the driver over time", parts)


# -- the rooms ------------------------------------------------------------------------------------

# Each room has folders with one job; what is recorded and the page that shows it are two jobs.
ROOMS_FILE = "docs/images/rooms.svg"
ROOMS: Mapping[str, Sequence[str]] = {
    "commands, trainers of other libraries, doubles": (
        *("rollout.cli", "rollout.adapters"),
        "rollout.testing",
    ),
    "handles, actors, one process": ("rollout.runtime",),
    "page, metrics": ("rollout.observability.page",),
    "groups, servers, recovery": ("rollout.control",),
    "chats of agents": ("rollout.agents",),
    "pushes, routes, store": ("rollout.weights",),
    "requests to engines": ("rollout.router",),
    "samples, rewards": ("rollout.driver",),
    "what happened when": ("rollout.observability", "rollout.observability.timeline"),
    "decisions": ("rollout.rules",),
    "settings": ("rollout.config",),
    "errors, values": ("rollout.core",),
    "kinds of engines": (
        *("engines.embedded", "engines.sglang", "engines.vllm"),
        *("engines.vllm_plugin", "engines.fake"),
    ),
    "bytes of tensors": ("engines.tensors",),
    "calls and processes of engines": ("engines.protocol", "engines.http", "engines.process"),
}


@cache
def imports() -> dict[str, set[str]]:
    """Each top folder of ``rollout`` and of ``engines``, and the folders that it imports."""
    found: dict[str, set[str]] = {}
    for package in ("rollout", "engines"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if (
                folder := folder_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
            ) is None:
                continue
            named = (folder_of(name) for name in _imported(path))
            found.setdefault(folder, set()).update(each for each in named if each)
    return {folder: targets & found.keys() - {folder} for folder, targets in found.items()}


def folder_of(module: str) -> str | None:
    """The folder of a module in the picture; None for a file directly in a package."""
    parts = module.split(".")
    part, folder = ".".join(parts[:3]), ".".join(parts[:2])
    if any(part in folders for folders in ROOMS.values()):
        return part
    return folder if folder.startswith(("rollout.", "engines.")) and _is_folder(folder) else None


def _is_folder(name: str) -> bool:
    return (ROOT / name.replace(".", "/")).is_dir()


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def below() -> dict[str, set[str]]:
    """Each room, and the other rooms that its folders import."""
    room_of = {folder: room for room, folders in ROOMS.items() for folder in folders}
    return {
        room: {room_of[name] for folder in folders for name in imports()[folder]} - {room}
        for room, folders in ROOMS.items()
    }


def levels() -> list[list[str]]:
    """The rooms in rows, the highest first: each imports only from rows below its own."""
    rooms = below()

    @cache
    def level(room: str) -> int:
        return 1 + max((level(name) for name in rooms[room]), default=-1)

    rows = sorted(ROOMS, key=lambda room: -level(room))
    return [list(row) for _, row in groupby(rows, key=level)]


def shown(room: str) -> str:
    """The folders of a room in one line, each package named once."""
    folders = [folder.replace(".", "/") for folder in ROOMS[room]]
    package = folders[0].partition("/")[0]
    return f"{package}/ {', '.join(name.removeprefix(f'{package}/') for name in folders)}"


def rooms_picture() -> str:
    """One box for each room, over the rooms that it imports."""
    parts, width, height, pitch = [], 366, 46, 376
    rows = levels()
    most = max(len(row) for row in rows)
    for number, row in enumerate(rows):
        left = (most - len(row)) * pitch / 2 + 4
        for place, room in enumerate(row):
            named = "; ".join(sorted(below()[room])) or "nothing of this project"
            where, top = left + place * pitch, 8 + 60 * number
            parts.append(_box(where, top, width, height, "", f"imports {named}"))
            parts.append(_words(where + width / 2, top + 19, room, "middle"))
            parts.append(_words(where + width / 2, top + 37, shown(room), "middle"))
    return _svg(most * pitch, 60 * len(rows) + 12, "the rooms, each over those it imports", parts)


def rooms_file() -> str:
    """The same as a file of its own, which also shows where no page is built."""
    drawn = rooms_picture().removeprefix("<figure>").removesuffix("</figure>")
    for old, new in (
        ("<svg", '<svg xmlns="http://www.w3.org/2000/svg"'),
        ("max-width: 100%", "color: #222; background: #fff"),
        ("inherit", "sans-serif"),
    ):
        drawn = drawn.replace(old, new, 1)
    return drawn + "\n"


if __name__ == "__main__":
    (ROOT / ROOMS_FILE).write_text(rooms_file())
