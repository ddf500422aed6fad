"""Readers of files: journals, records, leases, what a run has recorded, and checkpoints."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from engines.embedded.core.model_config import read_model_config
from engines.process import engine_records, locks
from engines.process.guard import RECORD, place
from engines.process.own_files import OwnFolder
from engines.process.process_identity import identify
from engines.protocol import FinishReason
from rollout.agents.turns import files
from rollout.agents.turns.tree import Generated, Prompt, TurnTree
from rollout.agents.wire.messages import history_of
from rollout.config import VerifyConfig
from rollout.config.run_dir import FIGURES_FILE, LAUNCH_FILE, SPANS_SUFFIX, RunFolder
from rollout.control.engine.probe import prompts_of
from rollout.control.server import journal
from rollout.core.errors import ConfigError, RolloutError, WeightMismatch
from rollout.driver.stream.journal import JournalFiles
from rollout.observability.page.run_history import RunHistory
from rollout.observability.recorded import read_figures, recorded_curves
from rollout.observability.step_reports import ReportFile
from rollout.observability.timeline.span import Kind, Outcome, Span
from rollout.observability.timeline.span_file import read_spans
from rollout.weights.format import checkpoint_config
from rollout.weights.format.checkpoint_files import why_not_whole
from rollout.weights.format.manifest import Manifest, TensorSpec, read_checkpoint_manifest
from rollout.weights.format.plain_adapter import plain_adapter
from tools.fuzz.reader import Reader, Refused, whole

_DEEP = b"[" * 5000
_DAMAGED = (
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b"\xff\xfe{}",
    _DEEP,
    b'{"a":' * 300 + b"1" + b"}" * 300,
)


def _values(*values: Any) -> tuple[Any, ...]:
    return values


@cache
def _folder() -> Path:
    """A folder of this process."""
    made = Path(tempfile.mkdtemp(prefix="rollout-fuzz-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


def _at(name: str, read: Callable[[Path], Any]) -> Callable[[Sequence[bytes]], Any]:
    """Reads the input as a file of this name, which may have folders."""

    def in_file(data: bytes) -> Any:
        path = _folder() / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        found = read(path)
        if found is None or found == {}:
            raise Refused
        return found

    return whole(in_file)


# -- of a run -----------------------------------------------------------------------------------


def _journals() -> Iterator[bytes]:
    path = _folder() / "made" / "journal.json"
    made = journal.ServerJournal.of(path, "run", "server", "local")
    made._write(made._first, 1, False)
    text = path.read_bytes()
    yield text
    values = json.loads(text)
    engine = {"processes": [values["process"]]}
    for name in values:
        for value in _values(None, [], "x", -1, {}, [engine], [{**engine, "engine_id": "e"}]):
            yield json.dumps({**values, name: value}).encode()
    yield from _DAMAGED


def _driver_journal(path: Path) -> Any:
    files = JournalFiles(path.parent)
    try:
        state = files.read(0).state()
    finally:
        files.close()
    return state or None


def _driver_journals() -> Iterator[bytes]:
    work = {"serial": 1, "prompt": {"prompt": [1]}}
    first = {
        "works": [work],
        "next_serial": 2,
        "step": -1,
        "audit": {"num_taken": 2, "delivered": [0], "dropped": []},
        "source": {},
        "name": "data",
    }
    more = {
        "works": [],
        "next_serial": 3,
        "delivered": [1],
        "in_step": 0,
        "dropped": [],
        "source": {},
    }
    lines = [json.dumps(one).encode() + b"\n" for one in (first, more)]
    yield b"".join(lines)
    yield lines[0] + lines[1][:9]
    yield lines[0] + b"{\n" + lines[1]
    for name in first:
        for value in _values(
            None,
            [1],
            "x",
            {},
            [{}],
            [{"serial": []}],
            {"delivered": [[]], "dropped": []},
        ):
            yield json.dumps({**first, name: value}).encode() + b"\n" + lines[1]
    for name in more:
        for value in _values(None, [1], "x", {}, [[]]):
            yield lines[0] + json.dumps({**more, name: value}).encode() + b"\n"
    yield from _DAMAGED


def _launch(path: Path) -> Any:
    return RunFolder(path.parent, "run").last_launch() or None


def _launches() -> Iterator[bytes]:
    yield b'{"launch": "abc"}'
    yield b'{"launch": {"a": [1]}}'
    yield from _DAMAGED


def _spans(path: Path) -> Any:
    return read_spans(path)


def _span_lines() -> Iterator[bytes]:
    span = Span(Kind.PHASE, "pause", "server", 1.0, 0.5, Outcome.OK, launch="x").to_dict()
    yield json.dumps(span).encode() + b"\n{\n"
    for name in span:
        for value in _values(None, [], {}, "x", 1e308, 10**30):
            yield json.dumps({**span, name: value}).encode() + b"\n"
    yield from _DAMAGED


def _curves(path: Path) -> Any:
    """Spans and figures of one server: half of the lines are in each file."""
    data, server = path.read_bytes(), path.parent
    spans, _, figures = data.partition(b"\n--\n")
    (server / f"{server.name}{SPANS_SUFFIX}").write_bytes(spans)
    (server / FIGURES_FILE).write_bytes(figures)
    history = RunHistory(ReportFile(server, "x").read()).to_dict()["figures"]
    found = recorded_curves(server, "x"), read_figures(server.parent), history
    json.dumps(found)
    return found if any(found) else None


def _recorded() -> Iterator[bytes]:
    line = next(_span_lines())
    report = {
        "at_s": 1.0,
        "step": 1,
        "launch": "x",
        "metrics": {"logprob_gap/mean": 0.5},
        "router": "r",
        "serial": 1,
        "driver": "d",
        "lengths": {"8": 1},
        "samples": [],
        "logprob_gaps": {"main-0": {"sum": 0.5}},
    }
    yield line + b"\n--\n" + json.dumps(report).encode() + b"\n"
    for name in report:
        for value in _values(None, [], {}, "x", [1], {"logprob_gap/mean": []}, 10**30):
            changed = json.dumps({**report, name: value}).encode() + b"\n"
            yield line + b"\n--\n" + json.dumps(report).encode() + b"\n" + changed
    for damaged in _DAMAGED:
        yield damaged + b"\n--\n" + damaged


def _engine_record(path: Path) -> Any:
    """The record of an engine, in a folder of this user."""
    folder = OwnFolder.open(str(path.parent))
    try:
        found = engine_records._read(folder, "token")
    finally:
        folder.close()
    if found is None:
        raise Refused
    return found


def _engine_records() -> Iterator[bytes]:
    own = identify(os.getpid())
    assert own is not None
    here = [own.pid, own.started]
    right = {"place": place(), "engine": here, "name": "e", "files": ["/x*"], "since_s": 1}
    yield json.dumps(right).encode()
    for name in right:
        for value in _values(
            None, [], {}, "x", [1], [-1, 0], [[], {}], ["1", "2"], [10**30, 1.5], 5
        ):
            yield json.dumps({**right, name: value}).encode()
    yield from _DAMAGED


def _session_file(data: bytes) -> Any:
    lines = [line + b"\n" for line in data.split(b"\n")]
    found = files.read_lines("f", "s", [*lines[:-1], lines[-1][:-1]])
    if not found.tree.turns:
        raise Refused
    return [found.pinned, [b"".join(turn.json()) for turn in found.tree.turns]]


def _session_files() -> Iterator[bytes]:
    """Those with a wrong value have the right check of their line."""
    chat = history_of([{"role": "user", "content": "a"}], None)
    made = Generated([7], [-0.5], (), FinishReason("stop", 2), "x")
    tree = TurnTree()
    tree.add(tree.made(chat, Prompt(None, [1, 2]), made, {"role": "assistant", "content": "x"}))
    first = b"".join(files.first_line("s"))
    line = b"".join(files.line_of(tree.turns[0]))
    yield first + line
    yield first + line + line[:50]
    fields = json.loads(line)
    del fields["crc32"]
    for name in fields:
        for value in _values(None, -1, [], {}, "x", [1], [[]], [None], 10**30, 1.5, "AA==", True):
            yield first + b"".join(files._line({**fields, name: value}))
    yield first + b"".join(files._line({}))
    yield b"".join(files._line({"format": 2, "session_id": "s"}))
    yield from (first + damaged for damaged in _DAMAGED)


def _lock(path: Path) -> Any:
    return locks.owner_of(path) and locks.read_values(path)


def _locks() -> Iterator[bytes]:
    yield b'{"pid": 5, "host": "h", "run": "x"}   '
    yield from _DAMAGED


# -- checkpoints --------------------------------------------------------------------------------


def _checkpoint(path: Path) -> Any:
    """Everything that is read of a ``config.json``."""
    folder = path.parent
    config = checkpoint_config.read_checkpoint_config(folder)
    found = [
        checkpoint_config.quantisation_of(config),
        checkpoint_config.has_experts(config),
        checkpoint_config.is_tied(config),
        checkpoint_config.head_size_of(config),
        checkpoint_config.elements_of(config),
        checkpoint_config.element_bytes_of(config),
        prompts_of(VerifyConfig(), str(folder)),
    ]
    found += [
        checkpoint_config.image_tokens_of(config),
        checkpoint_config.vocabulary_of(config),
        checkpoint_config.context_length_of(config),
    ]
    return found if config else None


def _checkpoints() -> Iterator[bytes]:
    right = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": 1000,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "head_dim": 16,
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        "image_token_id": 5,
        "text_config": {},
    }
    yield json.dumps(right).encode()
    del right["text_config"]
    for name in right:
        for value in _values(None, [], {}, "x", [1], -1, 0, 1.5, 1e308, 10**30, True, "a" * 50):
            yield json.dumps({**right, name: value}).encode()
    yield json.dumps({"text_config": right}).encode()
    yield from _DAMAGED


def _index(path: Path) -> Any:
    return None if why_not_whole(path.parent) else "whole"


def _indices() -> Iterator[bytes]:
    yield b'{"weight_map": {}}'
    yield b'{"weight_map": {"a": "model.safetensors.index.json"}}'
    for value in _values(
        b"[]", b'{"a": 5}', b'{"a": []}', b'{"a": "../x"}', b'{"a": "\\u0000"}', b"null"
    ):
        yield b'{"weight_map": ' + value + b"}"
    yield b'{"weight_map": {"a": "' + b"x" * 5000 + b'"}}'
    yield from _DAMAGED


def _manifest(path: Path) -> Any:
    return read_checkpoint_manifest(path.parent)


def _manifests() -> Iterator[bytes]:
    from tools.fuzz.of_tensors import _files

    return _files()


def _adapter(data: bytes) -> Any:
    """A configuration of PEFT's, as a push sends it to engines."""
    from engines.plain_json import read_json

    try:
        config = read_json(data)
    except ValueError:
        raise Refused from None
    if not isinstance(config, dict):
        raise Refused
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    tensors = Manifest.of(
        [
            TensorSpec(layer.format("A"), "float32", (4, 8)),
            TensorSpec(layer.format("B"), "float32", (8, 4)),
        ]
    )
    base = Manifest.of([TensorSpec("model.layers.0.self_attn.q_proj.weight", "float32", (8, 8))])
    return plain_adapter(config, tensors, base)


def _adapters() -> Iterator[bytes]:
    right = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "use_rslora": False,
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"q_proj": 16},
        "target_modules": ["q_proj"],
        "init_lora_weights": True,
    }
    yield json.dumps(right).encode()
    for name in right:
        for value in _values(
            None,
            [],
            {},
            "x",
            0,
            -1,
            1.5,
            1e308,
            10**400,
            {"(a*)*b": 4},
            {"(": 4},
            {"x": []},
        ):
            yield json.dumps({**right, name: value}).encode()
    yield json.dumps({**right, "rank_pattern": {"(.*)*$x": 4, "q": 10**30}}).encode()
    yield from _DAMAGED


def readers() -> Sequence[Reader]:
    """The readers of this module."""
    return (
        Reader("server_journal", _at("journal.json", journal.read), (RolloutError,), _journals),
        Reader(
            "driver_journal",
            _at("data/00000000.jsonl", _driver_journal),
            (ConfigError,),
            _driver_journals,
        ),
        Reader("launch_file", _at(f"run/{LAUNCH_FILE}", _launch), (), _launches),
        Reader("span_file", _at(f"s{SPANS_SUFFIX}", _spans), (ConfigError,), _span_lines),
        Reader("recorded", _at("recorded/server/input", _curves), (), _recorded),
        Reader("engine_record", _at(RECORD, _engine_record), (), _engine_records),
        Reader("session_file", whole(_session_file), (files.UnreadableSession,), _session_files),
        Reader("file_lock", _at("lock", _lock), (), _locks),
        Reader("checkpoint_config", _at("model/config.json", _checkpoint), (), _checkpoints),
        Reader(
            "model_config",
            _at("embedded/config.json", lambda path: read_model_config(path.parent)),
            (ValueError,),
            _checkpoints,
        ),
        Reader("checkpoint_index", _at("index/model.safetensors.index.json", _index), (), _indices),
        Reader(
            "checkpoint_manifest",
            _at("m/model.safetensors", _manifest),
            (WeightMismatch,),
            _manifests,
        ),
        Reader("adapter_config", whole(_adapter), (WeightMismatch,), _adapters),
    )
