"""Operations on the engines of one group."""
