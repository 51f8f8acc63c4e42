"""Fast or exact operations in place of torch's: attention, dropout and embeddings on CPUs, layers without padding."""
