"""Pushes that change nothing are findings, and those of real optimisers are not.  Needs torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from rollout.core.types import UnchangedWeights
from rollout.weights.format.lora_check import prefixed_manifest
from rollout.weights.format.manifest import Manifest, TensorSpec
from rollout.weights.push.unchanged import NUM_PUSHES, PushChanges

torch = pytest.importorskip("torch")
from engines.tensors.torch_fingerprint import device_fingerprints, fingerprints  # noqa: E402

pytestmark = pytest.mark.embedded
VISION, ATTENTION = "model.visual.*", "model.layers.*.self_attn.q_proj.weight"
MODEL = {
    "model.embed.weight": (64, 64),
    **{
        f"model.layers.{layer}.{name}": shape
        for layer in range(3)
        for name, shape in {
            "self_attn.q_proj.weight": (64, 64),
            "mlp.up_proj.weight": (64, 64),
            "norm.weight": (64,),
        }.items()
    },
    "model.visual.proj.weight": (64, 64),
    "model.visual.norm.weight": (64,),
}
Named = Mapping[str, Any]


def manifest_of(tensors: Named, hashed: Callable[[Any], dict[str, str]] = fingerprints) -> Manifest:
    """What a server gets to know of a push."""
    specs = (
        TensorSpec(name, str(one.dtype).removeprefix("torch."), tuple(one.shape))
        for name, one in tensors.items()
    )
    return Manifest.of(specs, hashed(tensors))


def trained(version: int, kept: Callable[[str], bool] = lambda name: False) -> Named:
    """Weights of a version: all differ from those of the others, but for the kept ones."""
    return {
        name: torch.full(shape, 1.0 if kept(name) else 1.0 + version)
        for name, shape in MODEL.items()
    }


def noted(changes: PushChanges, num: int, *kept: str) -> list[list[UnchangedWeights]]:
    """The new findings of so many pushes that leave out what has one of these texts in its name."""
    return [
        list(
            changes.note(
                version,
                manifest_of(trained(version, lambda name: any(text in name for text in kept))),
            )
        )
        for version in range(1, num + 1)
    ]


def test_the_second_push_in_a_row_that_changes_nothing_is_a_finding_once() -> None:
    changes = PushChanges()
    found = [list(changes.note(version, manifest_of(trained(0)))) for version in range(1, 6)]
    assert [len(one) for one in found] == [0, 0, 1, 0, 0]
    (first,), (now,) = found[2], changes.findings or ()
    assert "version 3 has the contents of the one before version 2" in first.what
    assert (now.num_pushes, now.num_tensors, now.patterns) == (4, len(MODEL), ())
    assert now.causes
    assert now.advice
    assert changes.metrics() == {"server/unchanged_tensors": len(MODEL)}
    assert not list(changes.note(6, manifest_of(trained(6))))
    assert (changes.findings, changes.metrics()) == ((), {"server/unchanged_tensors": 0.0})


def test_a_repeated_call_is_no_second_push() -> None:
    changes = PushChanges()
    for version in (1, 1, 1, 1, 2, 2, 2):
        changes.note(version, manifest_of(trained(0)))
    assert changes.findings == ()
    changes.note(3, manifest_of(trained(0)))
    assert changes.findings


def test_without_fingerprints_nothing_is_known_and_those_of_two_methods_are_not_compared() -> None:
    changes = PushChanges()
    for version in range(1, 6):
        changes.note(version, Manifest(manifest_of(trained(0)).tensors))
    assert (changes.findings, changes.metrics()) == (None, {})
    # A push by sums between two by bytes: the third has none to compare with.
    for version, hashed in enumerate((fingerprints, by_sums, fingerprints, fingerprints), 6):
        changes.note(version, manifest_of(trained(0), hashed))
    assert changes.findings == ()


def by_sums(tensors: Named) -> dict[str, str]:
    return device_fingerprints(tensors.items())


@pytest.mark.parametrize(
    ("kept", "patterns", "num_tensors"),
    [
        (["self_attn"], (ATTENTION,), 3),
        (["visual"], (VISION,), 2),
        (["embed"], ("model.embed.weight",), 1),
        (["layers.1."], ("model.layers.1.*",), 3),
        (["layers.0.", "layers.2."], ("model.layers.0.*", "model.layers.2.*"), 6),
        (["layers"], ("model.layers.*",), 9),
    ],
)
def test_a_part_that_never_changes_while_others_do_is_a_finding_that_names_it(
    kept: list[str], patterns: tuple[str, ...], num_tensors: int
) -> None:
    changes = PushChanges()
    found = noted(changes, NUM_PUSHES + 3, *kept)
    assert [len(one) for one in found] == [0] * NUM_PUSHES + [1, 0, 0]
    (finding,) = found[NUM_PUSHES]
    assert (finding.patterns, finding.num_tensors) == (patterns, num_tensors)
    assert all(pattern in finding.what for pattern in patterns)
    assert "weights.frozen" in finding.advice[-1]
    # What it names is what the setting takes.
    assert all(not new for new in noted(PushChanges(patterns), NUM_PUSHES + 3, *kept))


def test_two_parts_are_two_findings_and_each_ends_when_it_changes() -> None:
    changes = PushChanges()
    noted(changes, NUM_PUSHES + 1, "visual", "self_attn")
    assert {one.patterns for one in changes.findings or ()} == {(VISION,), (ATTENTION,)}
    version = NUM_PUSHES + 2
    changes.note(version, manifest_of(trained(version, lambda name: "visual" in name)))
    assert [one.patterns for one in changes.findings or ()] == [(VISION,)]


def test_norms_and_single_layers_of_a_part_that_changes_are_no_findings() -> None:
    kept = ["norm", "layers.1.self_attn"]
    assert all(not new for new in noted(PushChanges(), 5 * NUM_PUSHES, *kept))


def test_all_that_is_frozen_is_left_out_of_a_push_that_changes_nothing() -> None:
    """A push of frozen weights alone says nothing of the others."""
    changes = PushChanges(["model.visual.*"])
    frozen = {name: one for name, one in trained(0).items() if "visual" in name}
    for version in range(1, 6):
        changes.note(version, manifest_of(frozen))
    assert changes.findings == ()


def test_partial_pushes_count_for_what_they_hold() -> None:
    changes = PushChanges()
    for version in range(1, 4 * NUM_PUSHES):
        wanted = "self_attn" if version % 2 else "mlp"
        part = {name: one for name, one in trained(version).items() if wanted in name}
        changes.note(version, manifest_of(part))
    assert changes.findings == ()


# -- adapters -------------------------------------------------------------------------------------


def adapter(value_a: float, value_b: float, *, padded: bool = False) -> Manifest:
    """An adapter of one module in two layers; a padded one has zeros for the second."""
    tensors = {}
    for layer in range(2):
        for half, value in (("A", value_a), ("B", value_b)):
            name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{half}.weight"
            value = 0.0 if padded and layer else value
            tensors[name] = torch.full((8, 512) if half == "A" else (512, 8), value)
    return prefixed_manifest("policy", manifest_of(tensors))


def test_an_adapter_of_zeros_is_a_finding_at_the_second_push_that_trained_something() -> None:
    changes = PushChanges()
    assert not list(changes.note(1, adapter(1.0, 0.0), "policy"))
    (found,) = changes.note(2, adapter(2.0, 0.0), "policy")
    assert found.adapter == "policy"
    assert "every lora_B is zero" in found.what
    changes.note(3, adapter(3.0, 1.0), "policy")
    assert changes.findings == ()


def test_a_new_adapter_of_zeros_may_be_pushed_after_the_step_at_a_rate_of_0_and_not_again() -> None:
    changes = PushChanges()
    found = [list(changes.note(version, adapter(1.0, 0.0), "policy")) for version in range(1, 5)]
    assert [len(one) for one in found] == [0, 0, 1, 0]
    assert "every lora_B is zero" in found[2][0].what


def test_zeros_that_fill_up_an_adapter_are_not_expected_to_change() -> None:
    changes = PushChanges()
    for version in range(1, 2 * NUM_PUSHES):
        changes.note(version, adapter(version, version, padded=True), "policy")
    assert changes.findings == ()


def test_a_first_half_may_stay_and_a_second_half_may_not() -> None:
    changes = PushChanges()
    for version in range(1, 2 * NUM_PUSHES):
        changes.note(version, adapter(1.0, version), "policy")
    assert changes.findings == ()
    for version in range(2 * NUM_PUSHES, 4 * NUM_PUSHES):
        changes.note(version, adapter(version, 7.0), "policy")
    (found,) = changes.findings or ()
    assert found.patterns == ("model.layers.*.self_attn.q_proj.lora_B.weight",)
    frozen = PushChanges(["model.layers.*.self_attn.q_proj.weight"])
    for version in range(1, 2 * NUM_PUSHES):
        frozen.note(version, adapter(version, 7.0), "policy")
    assert frozen.findings == ()


def test_base_and_adapters_have_histories_of_their_own() -> None:
    changes = PushChanges()
    for version in range(1, 9, 2):
        changes.note(version, manifest_of(trained(0)))
        changes.note(version + 1, adapter(version, version), "policy")
    assert [one.adapter for one in changes.findings or ()] == [""]


# -- real optimisers ------------------------------------------------------------------------------


class WithAdapter(torch.nn.Module):  # type: ignore[misc]
    """A linear layer with LoRA's two halves, begun as PEFT begins them."""

    def __init__(self, base: Any, rank: int = 8) -> None:
        super().__init__()
        self.base = base
        self.lora_A = torch.nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_B = torch.nn.Parameter(torch.zeros(base.out_features, rank))
        torch.nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, states: Any) -> Any:
        return self.base(states) + 2 * ((states @ self.lora_A.T) @ self.lora_B.T)


def make_model(*, has_adapter: bool) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=False,
        )
    )
    if has_adapter:
        for one in model.parameters():
            one.requires_grad_(False)
        for name, module in list(model.named_modules()):
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                parent, _, child = name.rpartition(".")
                setattr(model.get_submodule(parent), child, WithAdapter(module))
    return model


def train(
    model: Any, optimiser: Any, num_warmup: int, num: int, *, has_adapter: bool = False
) -> Iterator[Named]:
    """What is pushed before each of so many steps of a policy gradient: bfloat16 of float32."""
    chosen = {
        name: one for name, one in model.named_parameters() if "lora_" in name or not has_adapter
    }
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1.0, step / num_warmup)
    )
    for _ in range(num):
        yield {
            f"base_model.model.{name}.weight" if has_adapter else name: one.detach().bfloat16()
            for name, one in chosen.items()
        }
        ids = torch.randint(0, 256, (4, 12))
        logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1).gather(-1, ids[:, 1:, None])
        (-logprobs[..., 0] * torch.randn(4, 1)).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad()


def of_pushes(pushes: Iterator[Named], *, adapter: str = "") -> list[UnchangedWeights]:
    """All findings of these pushes."""
    changes, found = PushChanges(), list[UnchangedWeights]()
    for version, tensors in enumerate(pushes, 1):
        manifest = manifest_of(tensors)
        manifest = prefixed_manifest(adapter, manifest) if adapter else manifest
        found += changes.note(version, manifest, adapter)
    assert changes.findings == ()
    return found


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """More threads than free cores make a step of a tiny model many times slower."""
    num = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num)


FEW = 60
OPTIMISERS = {
    "adamw": (lambda of: torch.optim.AdamW(of, lr=1e-6, weight_decay=0.01), 100),
    "adamw, slow warm-up": (lambda of: torch.optim.AdamW(of, lr=1e-6), 1000),
    "sgd": (lambda of: torch.optim.SGD(of, lr=1e-3), 100),
    "lora, adamw": (lambda of: torch.optim.AdamW(of, lr=1e-5), 100),
    "lora, sgd": (lambda of: torch.optim.SGD(of, lr=1e-2), 100),
}


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("num", [FEW, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_pushes_of_real_optimisers_are_no_findings(name: str, num: int) -> None:
    make, num_warmup = OPTIMISERS[name]
    has_adapter = name.startswith("lora")
    model = make_model(has_adapter=has_adapter)
    optimiser = make([one for one in model.parameters() if one.requires_grad])
    pushes = train(model, optimiser, num_warmup, num, has_adapter=has_adapter)
    assert of_pushes(pushes, adapter="policy" if has_adapter else "") == []


@pytest.mark.usefixtures("_one_thread")
def test_what_an_optimiser_does_not_get_is_a_finding() -> None:
    model, changes = make_model(has_adapter=False), PushChanges()
    parts = [one for name, one in model.named_parameters() if "self_attn" not in name]
    pushes = train(model, torch.optim.AdamW(parts, lr=1e-6), 1, NUM_PUSHES + 3)
    for version, tensors in enumerate(pushes, 1):
        changes.note(version, manifest_of(tensors))
    (found,) = changes.findings or ()
    assert found.patterns == ("model.layers.*.self_attn.*",)


def test_the_decision_on_20_000_tensors_takes_a_fifth_of_a_second_at_most() -> None:
    """Such a model has 250 GB: a push of it takes many seconds."""
    names = [
        f"model.layers.{layer}.mlp.experts.{expert}.{half}_proj.weight"
        for layer in range(52)
        for expert in range(128)
        for half in ("gate", "up", "down")
    ]
    specs = {name: TensorSpec(name, "bfloat16", (1536, 4096)) for name in names}
    changes, took_s = PushChanges(), []
    for version in range(1, NUM_PUSHES + 4):
        known = {
            name: f"xxh3:{0 if '.down_' in name else version:032x}{index:032x}"
            for index, name in enumerate(names)
        }
        began_s = time.thread_time()
        changes.note(version, Manifest(specs, known))
        took_s.append(time.thread_time() - began_s)
    assert changes.findings
    assert max(took_s[1:]) < 0.2
