"""The command `python -m runner.predict`, which `runner.evaluate` implements."""
