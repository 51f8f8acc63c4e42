"""`python -m runner.predict MODEL_OR_RUN -o FILE`: the predictions of a saved model."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("predict")
