"""One command for the first minutes on a GPU: what works there, and how fast it is."""
