"""The same training with the runner and its peers, and what the machine can do at most."""
