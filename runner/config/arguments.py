"""An argument parser for the runner's tools that reports a mistake in one sentence."""

from __future__ import annotations

import argparse
from typing import NoReturn

from runner.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """Raises UserError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        program = self.prog.removeprefix("python -m ").split()[0]
        raise UserError(f"{message}; python -m {program} --help shows its usage")
