"""Command lines of the runner's own tools: a mistake is one sentence, as everywhere."""

from __future__ import annotations

import argparse
from typing import NoReturn

from runner.errors import UserError


class ArgumentParser(argparse.ArgumentParser):
    """argparse's parser, which raises UserError where that prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        program = self.prog.removeprefix("python -m ").split()[0]
        raise UserError(f"{message}; python -m {program} --help shows how it is used")
