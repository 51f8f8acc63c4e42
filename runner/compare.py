"""`python -m runner.compare RUN…`: compare setups by metric and speed, over seeds."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("compare")
