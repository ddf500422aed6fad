"""Spans of a step, as a server of two engines records them."""

from rollout.observability.timeline.span import Kind, Outcome, Span


def phase(name: str, start_s: float, elapsed_s: float, **more: object) -> Span:
    return Span(Kind.PHASE, name, "policy", start_s, elapsed_s, Outcome.OK, **more)


def engine(name: str, engine_id: str, start_s: float, elapsed_s: float, **more: object) -> Span:
    values = {"outcome": Outcome.OK, **more}
    return Span(Kind.ENGINE, name, "policy/main", start_s, elapsed_s, engine_id=engine_id, **values)


def offload_step(at_s: float = 100.0) -> list[Span]:
    """A second down, ten for the trainer, two up."""
    return [
        phase("pause_generation", at_s, 0.25),
        engine("pause_generation", "main-0", at_s, 0.25),
        engine("pause_generation", "main-1", at_s, 0.05),
        phase("flush_cache", at_s + 0.25, 0.25),
        phase("release_memory_occupation", at_s + 0.5, 0.5),
        phase("onload_weights", at_s + 11.0, 0.5),
        phase("update_weights", at_s + 11.5, 1.0, weight_version=7),
        engine("update_weights", "main-0", at_s + 11.5, 0.2),
        engine("update_weights", "main-1", at_s + 11.5, 0.4),
        engine("update_weights", "main-1", at_s + 11.9, 0.4),
        phase("verify", at_s + 12.5, 0.1),
        phase("onload_kv", at_s + 12.6, 0.3),
        phase("continue_generation", at_s + 12.9, 0.1),
    ]


def rank_push(at_s: float = 111.5, version: int = 7) -> list[Span]:
    """A push of two ranks in the update of ``offload_step``."""
    found = []
    for rank, name, start_s, elapsed_s, num_bytes in (
        (0, "gather", at_s, 0.1, 300),
        (1, "gather", at_s, 0.2, 300),
        (1, "copy", at_s + 0.2, 0.1, 200),
        (0, "copy", at_s + 0.1, 0.3, 100),
        (0, "copy", at_s + 0.4, 0.1, 100),
    ):
        span = Span(Kind.RANK, name, "policy", start_s, elapsed_s, Outcome.OK)
        span.rank, span.num_bytes, span.said = rank, num_bytes, "bucket 1"
        span.weight_version = version
        if name == "copy":
            span.route, span.density = "by_value delta", None if rank else 0.015625
        found.append(span)
    return found
