"""`python -m fallow.head [--stand-in ADDRESS]`: the head without the command line.

`fallow local` and the testbed start the head like this. Agents that hear no head start a stand-in head with the address
of their node.
"""

import sys

from fallow.head.main import main
from fallow.model import Exit, FallowError


def run(words: list[str]) -> int:
    match words:
        case []:
            return main()
        case ["--stand-in", address]:
            return main(stand_in=address)
        case _:
            raise FallowError("usage: python -m fallow.head [--stand-in ADDRESS]", Exit.USAGE)


if __name__ == "__main__":
    try:
        sys.exit(run(sys.argv[1:]))
    except FallowError as error:
        sys.stderr.write(f"fallow daemon: {error.message}\n")
        sys.exit(int(error.code))
