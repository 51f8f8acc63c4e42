"""`python -m runner.compare`: compare setups by metric and speed over several seeds."""
