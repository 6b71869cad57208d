"""The command line: the library's verbs, in the library's words."""

from ompq.cli.commands import app

__all__ = ["app"]
