"""Finds pushes that change nothing, and parts of a model that no push changes.

Always true: only fingerprints of one method are compared; without fingerprints nothing is known.
One push that equals the one before is no finding: a warm-up begins with a step at a learning rate
of 0, and an adapter with zeros.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import translate
from math import prod

from engines.protocol.lora_config import module_and_half
from engines.tensors.fingerprint import host_fingerprint
from rollout.core.types import UnchangedWeights
from rollout.rules.fingerprint_check import adapter_prefix
from rollout.weights.format.manifest import Manifest, TensorSpec

MOST_EQUAL = 1
"""Pushes in a row that may equal the one before: the step at a learning rate of 0."""
NUM_PUSHES = 10
"""Pushes in a row that change others, after which a part that they left alone is a finding.

In 1 000 pushes of a tiny model with AdamW, while the learning rate rises to 1e-6 over 1 000 steps,
a layer pattern of 6 144 elements waits for 4 in a row; over 100 steps, or with SGD at 1e-3, for
none.
"""
FEWEST_ELEMENTS = 4096
"""Elements in the matrices of such a part. A small one waits long for its first change while a
learning rate is low, and norms stay 1.0 in bfloat16 for hundreds of pushes."""
_MOST_PATTERNS = 6

_NOT_UPDATED = (
    "the trainer pushes tensors that it does not train: a state_dict taken once, another copy of "
    "the model, a reference model",
    "the optimiser does not step: no gradients, every step skipped for an overflow, or a learning "
    "rate of 0",
    "the steps are smaller than the rounding of the weights: bfloat16 without float32 masters "
    "loses a step below 1/256 of a value",
)
_COMPARE = (
    "compare one tensor before and after optimizer.step(), and then the one that is pushed",
    "if nothing is trained on purpose, as in a warm-up of the critic, leave out the push meanwhile",
)
_LEFT_OUT = (
    "they get no gradients: requires_grad is False, they are missing in the optimiser, or the loss "
    "does not reach them",
    "the push takes them from elsewhere: a name map, a gather of shards or an export that keeps an "
    "old copy",
)


class PushChanges:
    """What the pushes of one server have changed.

    Args:
        frozen: patterns of tensors that never change.

    Attributes:
        findings: of the last pushes, the worst first, or None as long as the pushes have no
            fingerprints.
    """

    def __init__(self, frozen: Sequence[str] = ()) -> None:
        self.findings: tuple[UnchangedWeights, ...] | None = None
        self._frozen = frozen
        # By adapter; the base has no name.
        self._histories: dict[str, _History] = {}

    def note(
        self, version: int, manifest: Manifest, adapter: str = ""
    ) -> Iterable[UnchangedWeights]:
        """Note a push that the engines have; returns the findings that are new.

        Args:
            manifest: with the trainer's fingerprints.
            adapter: name of the adapter that was pushed, or empty for none.
        """
        if not manifest.fingerprints:
            return ()
        if adapter not in self._histories:
            self._histories[adapter] = _History(adapter, self._frozen)
        self._histories[adapter].note(version, manifest)
        known = {(old.adapter, old.patterns) for old in self.findings or ()}
        of_all = (history.findings for history in self._histories.values())
        self.findings = tuple(finding for found in of_all for finding in found)
        return [new for new in self.findings if (new.adapter, new.patterns) not in known]

    def metrics(self) -> dict[str, float]:
        """For the trackers of a training script, or empty if nothing is known."""
        if self.findings is None:
            return {}
        return {
            "server/unchanged_tensors": float(sum(found.num_tensors for found in self.findings))
        }


class _History:
    """The pushes of the base, or of one adapter."""

    def __init__(self, adapter: str, frozen: Sequence[str]) -> None:
        self.findings: tuple[UnchangedWeights, ...] = ()
        self._adapter = adapter
        # One pattern for all: the first push of a large model has 20 000 names.
        self._frozen = re.compile("|".join(map(translate, frozen)) or r"(?!)")
        self._prefix = adapter_prefix(adapter) if adapter else ""
        self._version = -1
        self._last: dict[str, str] = {}
        self._parts: _Parts | None = None
        # Of each part, the pushes in a row that have changed others and not it.
        self._streaks: Counter[str] = Counter()
        self._equal: list[int] = []
        self._zeros: list[int] = []

    def note(self, version: int, manifest: Manifest) -> None:
        new, last = manifest.fingerprints, self._last
        if self._parts is None or self._parts.names != new.keys():
            self._parts = self._divide(manifest)
        parts = self._parts
        if version > self._version:
            self._note_zeros(version, manifest, parts)
        if version <= self._version or _method(new) != _method(last):
            # A call was repeated, or these cannot be compared.
            self._version, self._last = max(version, self._version), {**last, **new}
            return
        changed = [name for name in parts.tracked if last.get(name) != new[name]]
        is_equal = not changed and bool(parts.tracked)
        if is_equal:
            self._equal.append(version)
        elif changed:
            self._equal = []
            touched = {part for name in changed for part in parts.of[name]}
            for part in parts.all:
                self._streaks[part] = 0 if part in touched else self._streaks[part] + 1
        self._version, self._last = version, {**last, **new}
        self.findings = tuple(self._find(parts, is_equal=is_equal))

    def _find(self, parts: _Parts, *, is_equal: bool) -> Iterator[UnchangedWeights]:
        num = len(parts.tracked)
        if len(self._zeros) > (1 + MOST_EQUAL if is_equal else 1):
            yield _zeros(self._adapter, self._zeros, len(parts.halves_b))
        elif len(self._equal) > MOST_EQUAL:
            yield _equal(self._adapter, self._equal, num)
        # An equal push leaves the streaks as they are.
        stuck = {part for part in parts.all if self._streaks[part] >= NUM_PUSHES}
        if stuck:
            for group in parts.grouped(stuck):
                num_pushes = min(self._streaks[part] for part in group.parts)
                yield _stuck(self._adapter, group.patterns, group.num_tensors, num_pushes)

    def _note_zeros(self, version: int, manifest: Manifest, parts: _Parts) -> None:
        """Note whether all second halves of an adapter are zero, so that it changes nothing."""
        known = manifest.fingerprints
        is_zero = bool(parts.halves_b) and all(
            known[name] == zero for name, zero in parts.halves_b.items()
        )
        self._zeros = [*self._zeros, version] if is_zero else []

    def _divide(self, manifest: Manifest) -> _Parts:
        names = manifest.fingerprints
        padding = self._padding(manifest)
        parts = _Parts(frozenset(names))
        for name in names:
            label = self._label(name)
            # An adapter's tensor goes by the name of the one that it is added to.
            module, is_half, _ = label.rpartition(".lora_")
            known_as = f"{module}.weight" if self._adapter and is_half else label
            spec = manifest.tensors.get(name)
            if name not in padding and not self._frozen.match(known_as) and spec is not None:
                # The gradient of a first half is as small as the second: SGD's steps are rounded
                # away for a hundred pushes. The second half of an adapter that is trained changes.
                is_counted = len(spec.shape) > 1 and not label.endswith(".lora_A.weight")
                parts.add(name, label, prod(spec.shape) if is_counted else 0)
                if label.endswith(".lora_B.weight"):
                    parts.halves_b[name] = self._zero_of(spec)
        return parts

    def _padding(self, manifest: Manifest) -> set[str]:
        """Halves of modules that the trainer's adapter lacks, which are pushed as zeros."""
        if not self._adapter:
            return set()
        by_module: dict[str, list[str]] = {}
        for name in manifest.fingerprints:
            by_module.setdefault(self._label(name).rpartition(".lora_")[0], []).append(name)
        found: set[str] = set()
        for names in by_module.values():
            first_halves = (name for name in names if self._label(name).endswith(".lora_A.weight"))
            # That of a module that is trained is never zero.
            if all(
                manifest.fingerprints[name] == self._zero_of(manifest.tensors[name])
                for name in first_halves
            ):
                found.update(names)
        return found

    def _zero_of(self, spec: TensorSpec) -> str:
        """The fingerprint of zeros; an adapter's is made of its bytes, under PEFT's name."""
        name = spec.name.removeprefix(self._prefix)
        return host_fingerprint(name, spec.dtype, spec.shape, bytes(spec.num_bytes))

    def _label(self, name: str) -> str:
        """The name of a tensor as the checkpoint begins it."""
        found = module_and_half(name.removeprefix(self._prefix)) if self._adapter else None
        return (
            name.removeprefix(self._prefix) if found is None else "{}.lora_{}.weight".format(*found)
        )


class _Group:
    """Parts that are reported together."""

    def __init__(self, patterns: Sequence[str], parts: Collection[str], num_tensors: int) -> None:
        self.patterns = tuple(patterns)
        self.parts = parts
        self.num_tensors = num_tensors


class _Parts:
    """The tensors of a push, by layer pattern and by layer.

    ``model.layers.5.mlp.up_proj.weight`` has the pattern ``model.layers.*.mlp.up_proj.weight``, and
    is in the layer ``model.layers.5``.

    Attributes:
        names: all tensors of the push.
        tracked: those that are expected to change.
        of: by tensor, its parts.
        halves_b: by second half of an adapter, the fingerprint of zeros.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.names = names
        self.tracked: list[str] = []
        self.of: dict[str, tuple[str, ...]] = {}
        self.halves_b: dict[str, str] = {}
        self._num_tensors: Counter[str] = Counter()
        self._num_elements: Counter[str] = Counter()
        # By layer, the patterns of its tensors.
        self._layers: dict[str, set[str]] = {}

    @property
    def all(self) -> Iterable[str]:
        return self._num_tensors

    def add(self, name: str, label: str, num_elements: int) -> None:
        words = label.split(".")
        numbers = [index for index, word in enumerate(words) if word.isdecimal()]
        pattern = ".".join("*" if word.isdecimal() else word for word in words)
        parts: tuple[str, ...] = (pattern,)
        if numbers:
            layer = ".".join(words[: numbers[0] + 1])
            self._layers.setdefault(layer, set()).add(pattern)
            parts = (pattern, layer)
        self.of[name] = parts
        self.tracked.append(name)
        for part in parts:
            self._num_tensors[part] += 1
            self._num_elements[part] += num_elements

    def grouped(self, stuck: Collection[str]) -> Iterator[_Group]:
        """These parts, under the shortest prefix that covers no other; small ones are left out."""
        patterns = [part for part in self._num_tensors if part not in self._layers]
        totals = Counter(prefix for pattern in patterns for prefix in _prefixes(pattern))
        of_stuck: dict[str, list[str]] = {}
        for pattern in patterns:
            if pattern in stuck:
                for prefix in _prefixes(pattern):
                    of_stuck.setdefault(prefix, []).append(pattern)
        done: set[str] = set()
        for pattern in patterns:
            if pattern not in stuck or pattern in done:
                continue
            prefix = next(p for p in _prefixes(pattern) if len(of_stuck[p]) == totals[p])
            members = of_stuck[prefix]
            done |= set(members)
            if any(map(self._is_large, members)):
                shown = members[0] if len(members) == 1 else f"{prefix}.*"
                yield _Group([shown], members, sum(self._num_tensors[member] for member in members))
        layers = [
            layer
            for layer, own in self._layers.items()
            if layer in stuck
            and self._is_large(layer)
            and not set(filter(self._is_large, own)) <= done
        ]
        if layers:
            num = sum(self._num_tensors[layer] for layer in layers)
            yield _Group([f"{layer}.*" for layer in layers], layers, num)

    def _is_large(self, part: str) -> bool:
        return self._num_elements[part] >= FEWEST_ELEMENTS


def _prefixes(pattern: str) -> list[str]:
    """The beginnings of a dotted name, the shortest first, and itself."""
    words = pattern.split(".")
    return [".".join(words[: index + 1]) for index in range(len(words))]


def _method(fingerprints: Mapping[str, str]) -> str:
    return next(iter(fingerprints.values()), "").partition(":")[0]


def _equal(adapter: str, versions: Sequence[int], num_tensors: int) -> UnchangedWeights:
    what = (
        f"{_of(adapter)}the last {len(versions)} pushes changed nothing: weight version "
        f"{versions[-1]} has the contents of the one before version {versions[0]}"
    )
    return UnchangedWeights(adapter, (), num_tensors, len(versions), what, _NOT_UPDATED, _COMPARE)


def _zeros(adapter: str, versions: Sequence[int], num_tensors: int) -> UnchangedWeights:
    what = (
        f"{_of(adapter)}every lora_B is zero in the last {len(versions)} pushes, up to weight "
        f"version {versions[-1]}: the engines generate with the base alone"
    )
    return UnchangedWeights(
        adapter, ("*.lora_B.weight",), num_tensors, len(versions), what, _NOT_UPDATED, _COMPARE
    )


def _stuck(
    adapter: str, patterns: Sequence[str], num_tensors: int, num_pushes: int
) -> UnchangedWeights:
    shown = ", ".join(patterns[:_MOST_PATTERNS])
    if more := patterns[_MOST_PATTERNS:]:
        shown += f" and {len(more)} more"
    named = shown.replace(".lora_B.weight", ".weight")
    advice = (
        "if they are trained, compare one of them before and after optimizer.step(), and then the "
        "one that is pushed",
        f"if they are frozen, name them in weights.frozen: {named}",
    )
    what = (
        f"{_of(adapter)}{num_tensors} tensors did not change in {num_pushes} pushes that changed "
        f"others: {shown}"
    )
    return UnchangedWeights(
        adapter, tuple(patterns), num_tensors, num_pushes, what, _LEFT_OUT, advice
    )


def _of(adapter: str) -> str:
    return f"adapter {adapter!r}: " if adapter else ""
