"""The text that people read uses plain English: none of the words of ``WORDS``.

Read are docstrings, comments and messages of Python, Markdown, the page's JavaScript and HTML,
and the comments and help texts of the build files.  Names of code in them are not: they stand in
backticks, before a bracket or after a dot.  The names that Python defines have words of their own
to avoid, ``NAME_WORDS``.  ``python tests/test_plain_english.py`` prints a count
for each folder, and with paths as arguments every hit in them.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

# The folders and files that must be clean.
CHECKED = (
    "CONTRIBUTING.md",
    "README.md",
    "SECURITY.md",
    "docs",
    "mkdocs.yml",
    "Makefile",
    ".ci",
    ".github",
    "examples",
    "rollout",
    "engines",
    "tests",
    "benchmarks",
)
# Files that may use the words, each with the reason.
EXCEPTIONS: dict[str, str] = {}

# A pattern (a space stands for any white space) and the plain word to use instead.
WORDS = {
    r"told|tells?|telling": "report, set, pass, or name what was given",
    r"who(m?ever|se?ever)": "the client, the caller, the user: name who it is",
    r"nobody": "no client, no engine, no process: name who it is",
    r"anew": "again",
    r"mend(s|ed|ing)?": "fix, repair",
    r"foresee(s|n)?|foresaw": "expected, planned",
    r"heal(s|ed|ing)?": "recover, restart",
    r"ow(e|es|ed)": "needs, must pass",
    r"vouch(es|ed|ing)?": "verify, confirm",
    r"testif(y|ies|ied|ying)": "report its fingerprints",
    r"outvoted": "differs from the majority",
    r"prov(e|es|ed|en|ing)|proofs?": "verify, verified, check",
    r"settl(e|es|ed|ing)": "resolve, finish, decide",
    r"said": "reported, returned",
    r"d(ie|ies|ied|ying) of": "crashes on, is killed by",
    r"of one's own|of its own accord|by its word": "its own, by itself, as it reports",
    r"what( \w+){1,3} left": "leftovers, the rest",
    r"knock(s|ed|ing)?": "requests, connects",
    r"lent|lend(s|ing)?": "removed from the group, its slot is free",
    r"(is|are|was|were|be|been|being|gets?) asked|asks (it|them|nobody)": "query, request, send",
    r"(is|are|was|were|be|being|been|stays?|feels?) well(?! \w)": "healthy",
    r"ill": "unhealthy, badly",
}
# In names of modules, classes, functions, parameters and attributes, and the word to use instead.
NAME_WORDS = {
    "carrier": "route",
    "word": "message, or what it is",
    "words": "messages, or what they are",
    "maker": "builder, writer",
    "makers": "builders, writers",
    "handover": "queue",
    "prove": "check, verify",
    "proved": "checked, verified",
    "told": "the thing itself",
    "said": "sent, the message",
    "turn": "callback, share; a turn is one of a conversation",
    "turns": "callbacks, shares; turns are those of a conversation",
    "held": "buffers, groups: what it is",
    "kept": "cached, copies: what it is",
    "found": "what it is",
}
# Where names may have some of them, by the start of the path, with the reason.
NAMES_ALLOWED: dict[str, tuple[str, str]] = {
    "engines/cpu/": ("held maker", "names of the libraries that the harnesses stand in for"),
    "engines/embedded/generation/attention.py": ("kept", "queries that are no padding"),
    "engines/embedded/generation/pause_gate.py": ("held", "requests held at a gate"),
    "engines/embedded/memory/mapped_files.py": ("kept", "files that stay mapped"),
    "engines/embedded/weights/broadcast_receiver.py": ("kept", "tensors kept between pushes"),
    "engines/fake/engine/fake_engine.py": ("held", "requests held at a gate"),
    "engines/process/": ("found", "a search of this machine's processes"),
    "engines/tensors/": ("word words", "of a processor, and of a safetensors header"),
    "engines/vllm_plugin/": ("kept", "tensors kept for the next push"),
    "rollout/config/http.py": ("held", "requests held at the gate"),
    "rollout/control/group/command_runner.py": ("turn", "a command waits for its turn"),
    "rollout/control/server/crash_cleanup.py": ("found", "a search for what a crash has left"),
    "rollout/core/arguments.py": ("words", "words of a message"),
    "rollout/core/command_lock.py": ("held", "a lock is held"),
    "rollout/driver/client/": ("turn turns", "of a conversation"),
    "rollout/driver/logprobs/gap_cause.py": ("words", "words of a message"),
    "rollout/driver/stream/work_queue.py": ("turns", "of a conversation"),
    "rollout/observability/timeline/": ("said", "a field of spans, in the files of runs"),
    "rollout/router/continuation/core.py": (
        "kept",
        "tokens kept of a lost engine, as its metric has it",
    ),
    "rollout/router/gate/": ("held", "requests held at the gate"),
    "rollout/router/proxy/": ("kept turn", "the same tokens; a turn of a conversation"),
    "rollout/router/sessions/": ("turn turns", "of a conversation"),
    "rollout/rules/": ("kept turns", "the same tokens; engines take turns"),
    "rollout/weights/ranks/figures.py": ("said", "a field of spans, in the files of runs"),
    "rollout/weights/store/": ("kept said", "which node has kept a unit, as its records say"),
}
# Not a name: nothing of code directly before or after it.
_PATTERNS = {
    re.compile(rf"(?<![\w.$])(?<!--)(?:{pattern})(?![\w(=])".replace(" ", r"\s+"), re.I): plain
    for pattern, plain in WORDS.items()
}


_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Hit(NamedTuple):
    """A word that is not plain, where it stands, and what to write instead."""

    path: str
    line: int
    word: str
    plain: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word!r}: {self.plain}"


class Text(NamedTuple):
    """Text that people read.

    Args:
        line: The line of the file it begins at.
        lines: The lines of the file it stands in; empty if they are those of ``text``.
    """

    line: int
    text: str
    lines: tuple[str, ...] = ()


# -- the text of a file ---------------------------------------------------------------------------

_CODE = re.compile(r"``.+?``|`[^`\n]+`", re.DOTALL)
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\])\([^)\s]*\)|https?://\S+")
# Comments and strings: the tokens of the standard library take ten times as long.
_PY = re.compile(
    r"#[^\n]*|\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}"
    r"|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'",
    re.DOTALL,
)
_JS = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`", re.DOTALL
)


def blanked(text: str) -> str:
    """As many characters, none of them a word, in the same lines."""
    return re.sub(r"[^\n]", "\0", text)


def without(pattern: re.Pattern[str], text: str) -> str:
    """The text with every match made blank."""
    return pattern.sub(lambda match: blanked(match.group()), text)


def comments(source: str) -> Iterator[Text]:
    """The comments of Python; those of consecutive lines are one text."""
    block: list[str] = []
    first = last = end = 0
    line = 1
    for match in _PY.finditer(source):
        line += source.count("\n", end, match.start())
        end = match.start()
        if not match.group().startswith("#"):
            continue
        if line != last + 1 and block:
            yield Text(first, "\n".join(block))
            block = []
        first = first if block else line
        last = line
        block.append(match.group().lstrip("#"))
    if block:
        yield Text(first, "\n".join(block))


def strings(source: str, *, with_messages: bool) -> Iterator[Text]:
    """The docstrings of Python; and its messages, which are the other strings with a space."""
    nodes = list(ast.walk(ast.parse(source)))
    lines = tuple(source.splitlines())
    bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if id(node) in inner:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                part.value
                if isinstance(part, ast.Constant) and isinstance(part.value, str)
                else "{}"
                for part in node.values
            )
        else:
            continue
        if id(node) in bare or (with_messages and " " in text):
            end = node.end_lineno or node.lineno
            yield Text(node.lineno, text, lines[node.lineno - 1 : end])


def markdown(source: str) -> Iterator[Text]:
    """Markdown; of its code blocks only diagrams and comments."""

    def comments_only(match: re.Match[str]) -> str:
        if match[2] == "mermaid":
            return match.group().replace("```", "\0\0\0")
        return re.sub(
            r"^(.*?)((?:^|(?<=\s))# .*)?$",
            lambda line: blanked(line[1]) + (line[2] or ""),
            match.group(),
            flags=re.MULTILINE,
        )

    yield Text(1, without(_LINK, _FENCE.sub(comments_only, source)))


def script(source: str) -> Iterator[Text]:
    """JavaScript, CSS or C: comments, and strings with a space."""
    kept, end = "", 0
    for match in _JS.finditer(source):
        piece = match.group()
        is_text = piece.startswith("/") or " " in piece
        kept += blanked(source[end : match.start()])
        kept += re.sub(r"^`|`$", "\0", piece) if is_text else blanked(piece)
        end = match.end()

    def messages(match: re.Match[str]) -> str:
        return re.sub(r'"[^"]* [^"]*"|.', lambda m: m[0] if m[0][0] == '"' else "\0", match[0])

    yield Text(1, re.sub(r"\$\{[^}]*\}", messages, kept))


def html(source: str) -> Iterator[Text]:
    """HTML: what stands between tags, and attributes with a space."""

    def attributes(match: re.Match[str]) -> str:
        return re.sub(r'="([^"]*)"|.', value, match.group())

    def value(match: re.Match[str]) -> str:
        is_text = match[1] and " " in match[1]
        return f"\0\0{match[1]}\0" if is_text else blanked(match.group())

    yield Text(1, re.sub(r"<[^>]+>", attributes, source))


def texts(path: Path) -> Iterator[Text]:
    """What people read in a file."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield from comments(source)
        yield from strings(source, with_messages="tests" not in path.parts)
    elif path.suffix == ".md":
        yield from markdown(source)
    elif path.suffix in (".js", ".css", ".c"):
        yield from script(source)
    elif path.suffix == ".html":
        yield from html(source)
    else:
        yield Text(1, source)


# -- the names of a file --------------------------------------------------------------------------


def names(path: Path) -> Iterator[tuple[int, str]]:
    """What a file of Python defines, by line: not variables of a function, which stay in it."""
    yield 1, path.stem
    tree = ast.parse(path.read_text(encoding="utf-8"))
    outside: list[ast.Module | ast.ClassDef] = [tree]
    outside += (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
    for body in outside:
        for one in body.body:
            targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", one)]
            for target in targets:
                if isinstance(target, ast.Name):
                    yield target.lineno, target.id


def name_hits(path: Path, name: str) -> list[Hit]:
    """The names that a file of Python defines with a word to avoid.

    Args:
        name: of the file in the repository.
    """
    allowed = {
        word
        for start, (some, _) in NAMES_ALLOWED.items()
        if name.startswith(start)
        for word in some.split()
    }
    return [
        Hit(name, line, defined, NAME_WORDS[part])
        for line, defined in names(path)
        for part in sorted({one.lower() for one in _PART.findall(defined)} & NAME_WORDS.keys())
        if part not in allowed
    ]


# -- hits -----------------------------------------------------------------------------------------


def line_of(text: Text, match: re.Match[str]) -> int:
    """The line of the file that the matched words begin in."""
    down = text.text.count("\n", 0, match.start())
    if not text.lines or text.text.count("\n") == len(text.lines) - 1:
        return text.line + down
    first = match.group().split()[0]
    within = (number for number, line in enumerate(text.lines) if first in line)
    return text.line + next(within, 0)


def hits_in(path: str, found: Iterable[Text]) -> list[Hit]:
    """The words of these texts that are not plain, by line."""
    hits = []
    for text in found:
        plain_text = text._replace(text=without(_CODE, text.text))
        for pattern, plain in _PATTERNS.items():
            for match in pattern.finditer(plain_text.text):
                word = " ".join(match.group().split())
                hits.append(Hit(path, line_of(plain_text, match), word, plain))
    return sorted(hits, key=lambda hit: hit.line)


SUFFIXES = {".py", ".md", ".js", ".css", ".c", ".html", ".yml", ".yaml", ".in", ".json", ""}


def files_of(path: Path) -> list[Path]:
    """The files with text under a path, or the path itself."""
    if path.is_file():
        return [path]
    return sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and file.suffix in SUFFIXES
        and not any(part.startswith((".", "__pycache__")) for part in file.relative_to(path).parts)
    )


def check(path: Path) -> list[Hit]:
    """Every hit in a file, or in the files of a folder."""
    hits = []
    for file in files_of(path):
        name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else str(file)
        if name not in EXCEPTIONS and file != Path(__file__).resolve():
            hits += hits_in(name, texts(file))
    return hits


def main(arguments: list[str]) -> int:
    """List the hits in the paths; without any, count those of each folder of the repository."""
    if arguments:
        hits = [hit for name in arguments for hit in check(Path(name).resolve())]
        print(*hits, sep="\n")
        print(len(hits), "hits;", *(f"{word} {n}," for word, n in words_of(hits).most_common(12)))
        return 1 if hits else 0
    for name in CHECKED:
        hits = check(ROOT / name)
        print(f"{len(hits):6} {name}{'' if name in CHECKED else '  (not checked yet)'}")
        inside = Counter("/".join(Path(hit.path).parts[:2]) for hit in hits)
        if len(inside) > 1:
            for folder, number in inside.most_common():
                print(f"       {number:6} {folder}")
    return 0


def words_of(hits: Iterable[Hit]) -> Counter[str]:
    """How often each word was found."""
    return Counter(hit.word.lower() for hit in hits)


# -- tests ----------------------------------------------------------------------------------------


def test_the_text_that_people_read_is_plain() -> None:
    hits = [str(hit) for name in CHECKED for hit in check(ROOT / name)]
    assert not hits, f"{len(hits)} words that are not plain English:\n" + "\n".join(hits)


NAMED = [file for folder in ("rollout", "engines") for file in files_of(ROOT / folder)]


def test_the_names_of_code_are_plain() -> None:
    python = [file for file in NAMED if file.suffix == ".py"]
    hits = [str(hit) for file in python for hit in name_hits(file, str(file.relative_to(ROOT)))]
    assert not hits, f"{len(hits)} names that are not plain English:\n" + "\n".join(hits)


def test_every_word_that_is_allowed_in_names_is_used_there() -> None:
    unused = []
    for start, (some, _) in NAMES_ALLOWED.items():
        files = [file for file in NAMED if str(file.relative_to(ROOT)).startswith(start)]
        parts = {
            part.lower()
            for file in files
            if file.suffix == ".py"
            for _, defined in names(file)
            for part in _PART.findall(defined)
        }
        unused += [f"{start}: {word}" for word in some.split() if word not in parts]
    assert unused == []


def test_names_of_all_kinds_are_read_and_those_inside_a_function_are_not(tmp_path: Path) -> None:
    (tmp_path / "carrier.py").write_text(
        "WORDS = 1\n"
        "class LocalWords:\n"
        "    held: int = 0\n"
        "    def prove_it(self, said, *, turn):\n"
        "        self.kept = found = said\n"
        "        returned = wordy = found\n"
    )
    hits = [(hit.line, hit.word) for hit in name_hits(tmp_path / "carrier.py", "carrier.py")]
    assert sorted(hits) == [
        (1, "WORDS"),
        (1, "carrier"),
        (2, "LocalWords"),
        (3, "held"),
        (4, "prove_it"),
        (4, "said"),
        (4, "turn"),
        (5, "kept"),
    ]


def test_every_checked_path_and_every_exception_exists() -> None:
    assert [name for name in (*CHECKED, *EXCEPTIONS) if not (ROOT / name).exists()] == []


# One for each pattern, in their order.
SAMPLES = (
    "the engine told us; it tells a lie; to tell; telling",
    "whoever comes, whomever it is",
    "nobody knows",
    "written anew",
    "it mends, it was mended, mending, mend",
    "it is foreseen; they foresee",
    "it heals",
    "it owes a check",
    "it vouches for it",
    "they testify; one testifies",
    "it was outvoted",
    "is proved; a proof; they prove; proving",
    "it settles; settling",
    "as was said",
    "SGLang dies of it; to die\nof",
    "of its own accord; of one's own",
    "what it has left; what is left of it",
    "a client knocks",
    "a slot is lent; lending",
    "it is asked; asks it",
    "the engine is well.",
    "an ill engine",
)


def test_each_word_is_caught() -> None:
    for (pattern, plain), sample in zip(WORDS.items(), SAMPLES, strict=True):
        assert plain in {hit.plain for hit in hits_in("sample", [Text(1, sample)])}, pattern


PYTHON = '''"""Nobody: line 1.

It is
told: line 4, and ``told`` is a name.
"""

# This dies
# of it: line 7.
def told(told, tell=None):
    file.tell(), tell.told, "told"
    raise ValueError(
        f"{told} names the"
        f" {tell} that mends it, `tell` apart: line 13"
    )
'''


def test_docstrings_comments_and_messages_are_read_and_names_are_not(tmp_path: Path) -> None:
    (tmp_path / "sample.py").write_text(PYTHON)
    hits = [(hit.line, hit.word) for hit in check(tmp_path / "sample.py")]
    assert hits == [(1, "Nobody"), (4, "told"), (7, "dies of"), (13, "mends")]


def test_markdown_is_read_without_code_and_with_the_comments_of_code(tmp_path: Path) -> None:
    (tmp_path / "sample.md").write_text(
        "It is told, not `told`, [see](told.md).\n\n```python\ntold()  # who is told\n```\n"
        "```mermaid\na --> b: anew\n```\n"
    )
    hits = [(hit.line, hit.word) for hit in check(tmp_path / "sample.md")]
    assert hits == [(1, "told"), (4, "told"), (7, "anew")]


def test_the_texts_of_the_page_are_read(tmp_path: Path) -> None:
    (tmp_path / "sample.js").write_text(
        "// anew\nconst told = tell('told', 'no reason told');\n"
        "show(`${told || 'tell'} anew`);\n"
        'show(`${told || "is told"}`);\n'
    )
    (tmp_path / "sample.html").write_text('<p class="told"\n title="is told">\nnobody</p>\n')
    assert [hit.line for hit in check(tmp_path / "sample.js")] == [1, 2, 3, 4]
    assert [hit.line for hit in check(tmp_path / "sample.html")] == [2, 3]


def test_every_hit_names_its_file_its_line_and_the_plain_word() -> None:
    (hit,) = hits_in("docs/page.md", [Text(7, "written\nanew")])
    assert str(hit) == "docs/page.md:8: 'anew': again"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
