"""A generation in the batch: transformers' ``RequestState`` with our rules for its end."""

from __future__ import annotations

from dataclasses import dataclass

from transformers.generation.continuous_batching.requests import RequestState, RequestStatus

from engines.embedded.generation import Generation


class Journal:
    """What the generation thread tells the event loop after each step.

    Attributes:
        weight_version: the version new tokens are produced by.
        touched: generations that ended, and streamed ones that grew, since the last report.
    """

    def __init__(self, weight_version: str) -> None:
        self.weight_version = weight_version
        self.touched: list[Generation] = []


@dataclass(repr=False)
class BatchState(RequestState):
    """One generation's place in the batch.  Made anew when its KV is dropped (a retract, or the
    cache running full), then with the completion so far as part of the prompt."""

    generation: Generation = None  # type: ignore[assignment]
    journal: Journal = None  # type: ignore[assignment]

    @classmethod
    def start(cls, generation: Generation, journal: Journal) -> BatchState:
        return cls(
            request_id=generation.rid,
            initial_tokens=generation.prompt_ids + generation.output_ids,
            max_new_tokens=None,
            generation=generation,
            journal=journal,
        )

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        self.generated_tokens.append(token_id)
        self.tokens_to_process = [token_id]
        is_last = self.generation.add(token_id, logprob or 0.0, self.journal.weight_version)
        if is_last:
            self.status = RequestStatus.FINISHED
        if is_last or self.generation.is_streamed:
            self.journal.touched.append(self.generation)
        return is_last

    def create_equivalent_initial_request(self) -> BatchState:
        return BatchState.start(self.generation, self.journal)

    def to_generation_output(self) -> Generation:
        return self.generation
