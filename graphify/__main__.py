"""The command line: `python -m graphify demo | doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from ._demo import demo
from ._doctor import doctor

COMMANDS = {
    "demo": (demo, "an MLP and a small decoder: eager, graphed, speed-up and equality"),
    "doctor": (doctor, "versions, devices, which backend would be used and why, one test capture"),
}


class Parser(argparse.ArgumentParser):
    """Answers a mistake with the whole help, which is short."""

    def error(self, message: str) -> NoReturn:
        """Say what was wrong below the help, and exit with 2."""
        self.print_help(sys.stderr)
        self.exit(2, f"\n{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 only if all it looked at was right."""
    parser = Parser(prog="python -m graphify", description="CUDA graphs for PyTorch callables.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, description=text)
    command, _ = COMMANDS[parser.parse_args(argv).command]
    return 0 if command() else 1


if __name__ == "__main__":
    sys.exit(main())
