"""`python -m runner.scale <overrides>`: up to which batch size does training stay the same, and by which rule?"""

from runner.cli import tool_main

if __name__ == "__main__":
    tool_main("scale")
