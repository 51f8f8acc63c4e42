"""Operations that torch has none for, or a slow one: attention, dropout and embeddings on CPUs, layers without padding."""
