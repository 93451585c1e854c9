"""`python -m fallow`: the command line."""

from __future__ import annotations

from fallow.cli.main import main

if __name__ == "__main__":
    main()
