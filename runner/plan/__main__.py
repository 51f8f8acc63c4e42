"""`python -m runner.plan [overrides]`: print the plan and the certificate, and train nothing."""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("plan")
