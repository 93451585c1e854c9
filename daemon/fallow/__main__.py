"""Entry point of the command line, as `fallow` and as `python -m fallow`."""

import signal


def main() -> None:
    """Load and run the command. While it loads, Ctrl-C ends the process without a traceback."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # a shell has background processes ignore SIGINT, which stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fallow.cli.main import main as run

    signal.signal(signal.SIGINT, usual)
    run()


if __name__ == "__main__":
    main()
