"""The command line: `fallow`, `python -m fallow`."""

import signal


def main() -> None:
    """Runs the command. Until it is loaded Ctrl-C ends it as it does any program, without a traceback."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # else somebody has it ignored, as shells do for what runs behind them
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from fallow.cli.main import main as run

    signal.signal(signal.SIGINT, usual)
    run()


if __name__ == "__main__":
    main()
