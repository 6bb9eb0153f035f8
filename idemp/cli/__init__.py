"""The command line `idemp`."""

from idemp.cli.main import main

__all__ = ["main"]
