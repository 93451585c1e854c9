"""`fallow completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command(short_help="Print shell completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print completion for SHELL. For bash, in ~/.bashrc: eval "$(fallow completion bash)"."""
    from fallow.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "fallow", "_FALLOW_COMPLETE").source())
