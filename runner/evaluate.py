"""`python -m runner.evaluate MODEL_OR_RUN`: the metrics of a saved model."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("evaluate")
