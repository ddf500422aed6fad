"""Operations on one engine."""
