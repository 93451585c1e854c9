"""`python -m fallow.head`: the head without the command line, as `fallow local` and the testbed start it."""

from __future__ import annotations

import sys

from fallow.head.main import main
from fallow.model import FallowError

if __name__ == "__main__":
    try:
        sys.exit(main())
    except FallowError as error:
        sys.stderr.write(f"fallow daemon: {error.message}\n")
        sys.exit(int(error.code))
