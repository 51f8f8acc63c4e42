"""`python -m runner.publish RUN --to owner/name`: the model of a run in a repository of the Hugging Face Hub."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("publish")
