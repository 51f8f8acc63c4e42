"""`python -m runner.scale <overrides>`: up to which batch size does training stay the same, and by which rule?"""

from __future__ import annotations

import sys

from runner.cli import scale_main

if __name__ == "__main__":
    sys.exit(scale_main(sys.argv[1:]))
