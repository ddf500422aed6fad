"""What a kind of engine keeps of old weights, and what is done so that no token has it.

Always true: it has only what acts.  What a flush or a pause clears, and what an engine derives from
its weights again, needs no row; after each push the sentinel (``verify.sentinel``) asks each
engine whether anything was left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

OUTLIVES = "embeddings of images would outlive a push that changes what computes them"
_INSTEAD = ", or name those tensors in weights.not_pushed"


@dataclass(frozen=True, slots=True, kw_only=True)
class OldState:
    """One kind of engine.

    Attributes:
        embeddings_variable: of its environment: at 0 it keeps no embeddings of images and sounds,
            or empty if there is none.
        refused: option -> why: it adds a store that no call clears and no name separates.
        refused_for_embeddings: options that are refused only where a push changes what computes
            embeddings.
        named_stores: shell patterns of options that add a store of prefixes which no call clears;
            names separate what two versions computed.
    """

    embeddings_variable: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    refused_for_embeddings: tuple[str, ...] = ()
    named_stores: tuple[str, ...] = ()

    def variables(self, *, keeps_embeddings: bool) -> dict[str, str]:
        """What an engine is launched with.

        Args:
            keeps_embeddings: no push changes what computes embeddings.
        """
        is_off = self.embeddings_variable and not keeps_embeddings
        return {self.embeddings_variable: "0"} if is_off else {}

    def refuse(
        self, options: Mapping[str, Any], env: Mapping[str, str], *, keeps_embeddings: bool
    ) -> None:
        """Refuse options and variables that would keep old state.

        Args:
            options: of the engine, in one spelling.
            env: its whole environment.
            keeps_embeddings: as in ``variables``.

        Raises:
            ValueError: naming the option or the variable, and what to set in its place.
        """
        if whys := self.why_refused(options, keeps_embeddings=keeps_embeddings):
            raise ValueError("; ".join(whys))
        for variable in self.variables(keeps_embeddings=keeps_embeddings):
            if (value := env.get(variable)) != "0":
                raise ValueError(f"{variable} = {value}: {OUTLIVES}; unset it{_INSTEAD}")

    def why_refused(self, options: Mapping[str, Any], *, keeps_embeddings: bool) -> list[str]:
        """Why some of these options are refused."""
        whys = {name: f"{why}; leave it out" for name, why in self.refused.items()}
        if not keeps_embeddings:
            of_embeddings = f"{OUTLIVES}; leave it out{_INSTEAD}"
            whys |= dict.fromkeys(self.refused_for_embeddings, of_embeddings)
        return [
            f"{name}: {whys[name]}"
            for name, value in options.items()
            if name in whys and is_on(value)
        ]

    def needs_names(self, options: Mapping[str, Any]) -> bool:
        """Whether only names separate prefixes of two versions, with these options.

        Args:
            options: of the engine, in one spelling.
        """
        return any(
            is_on(value) and any(fnmatchcase(name, pattern) for pattern in self.named_stores)
            for name, value in options.items()
        )


NOTHING_KEPT = OldState()


def is_on(value: Any) -> bool:
    """Whether the value of an option, given or reported, switches something on."""
    return value not in (None, False, 0, "", "0", "off", "none", "None")


def namespace(run: str, version: int | str | None) -> str:
    """What names the prefixes that weights of this version computed in this run.

    Args:
        run: of one router or group alone, so that no store has its name from before.
    """
    return run if version is None else f"{run}:v{version}"


_NO_NAME = (
    "its keys have no run and no weight version, and no call clears it (LMCache of 0.5.20, "
    "FlexKV); use hicache-storage-backend"
)

SGLANG = OldState(
    embeddings_variable="SGLANG_VLM_CACHE_SIZE_MB",
    refused={
        **dict.fromkeys(
            (
                *("enable_lmcache", "lmcache_config_file", "enable_flexkv", "flexkv_config_file"),
                "radix_cache_backend",
            ),
            _NO_NAME,
        ),
        "enable_streaming_session": "a session's KV is of the weights that it began with; use the "
        "router's /sessions",
        "weight_cache_mode": "engines of other runs have the same weights, and a push would change "
        "theirs",
    },
    refused_for_embeddings=("enable_mm_global_cache",),
    named_stores=(
        "hicache_storage_*",
        "file_storage_path",
        "disaggregation_decode_enable_offload_kvcache",
        "*external_linker*",
        "enable_linker_mla_dedup",
    ),
)
"""What SGLang keeps, as read in 0.5.20 to 0.5.23."""

_NO_SALT = "not all put cache_salt into their keys; use kv-offloading-size"

VLLM = OldState(
    refused={
        "kv_transfer_config": _NO_SALT,
        "kv_offloading_backend": _NO_SALT,
        "default_mm_loras": "no adapter is pushed to vLLM: it loads them from a folder only",
    },
    refused_for_embeddings=("ec_transfer_config", "ec_manager_config"),
)
"""What vLLM keeps, as read in 0.32 and 0.33.  Its ``/pause`` clears all other caches before weights
change."""

FAKE = OldState(
    embeddings_variable="FAKE_EMBEDDING_CACHE_MB",
    refused_for_embeddings=("shared_image_store",),
    named_stores=("storage_cache",),
)
"""One of each, with the flaws of SGLang."""
