"""The command line: ``ompq`` and its commands."""

from ompq.cli.main import app

__all__ = ["app"]
