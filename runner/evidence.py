"""`python -m runner.evidence RUN … -o bundle.zip`, and `python -m runner.evidence verify bundle.zip`."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("evidence")
