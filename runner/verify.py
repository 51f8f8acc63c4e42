"""`python -m runner.verify --a "<overrides>" --b "<overrides>"`: replay two setups in lockstep and compare them."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("verify")
