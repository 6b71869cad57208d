"""What several files of tests share: see test_console.py."""

import io

from rich.console import Console as RichConsole


def stream(*, terminal: bool) -> RichConsole:
    return RichConsole(file=io.StringIO(), width=100, force_terminal=terminal)
