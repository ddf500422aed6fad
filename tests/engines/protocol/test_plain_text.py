"""Errors and sizes as text."""

from __future__ import annotations

import pytest

from engines.protocol.plain_text import describe, first_line, shortened, size_text, value_text


def test_an_error_is_described_with_its_type_where_that_is_wanted() -> None:
    assert describe(ValueError("text"), with_type=True) == "ValueError: text"
    assert describe(TimeoutError(), with_type=True) == "TimeoutError"


def test_of_a_long_text_the_first_line_is_taken() -> None:
    assert first_line(ValueError("\nfirst \nsecond")) == "first "
    assert first_line("") == ""


def test_a_long_text_is_cut_and_says_so() -> None:
    assert shortened("12345678", 8) == "12345678"
    assert shortened("123456789", 8) == "12345..."
    assert value_text("123456789", 8) == "'1234..."


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (12 << 10, "12 KiB"),
        (196 << 20, "196 MiB"),
        (3 << 29, "1.50 GiB"),
        (-(5 << 20), "-5 MiB"),
    ],
)
def test_bytes_are_in_the_unit_that_reads_best(num_bytes: int | None, text: str) -> None:
    assert size_text(num_bytes) == text
