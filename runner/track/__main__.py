"""`python -m runner.track`: show MLflow's pages, or upload what a store does not have."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("track")
