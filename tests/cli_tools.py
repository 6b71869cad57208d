"""What the tests of the command line share: a tiny network and a way to run."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console as RichConsole
from typer.testing import CliRunner

from ompq.cli.main import app


def write(path, text):
    path.write_text(text)
    return path


def stream(*, terminal: bool) -> RichConsole:
    return RichConsole(file=io.StringIO(), width=100, force_terminal=terminal)


NETWORK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 8, 3, 2, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.shortcut = nn.Conv2d(4, 8, 1, 2)

    def forward(self, x):
        y = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(y)) + self.shortcut(x)).relu()

class Net(nn.Module):
    preprocessing = {"input_shape": (3, 8, 8)}

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.block = Block()
        self.fc = nn.Linear(8, 10)

    def forward(self, x):
        return self.fc(self.block(self.stem(x).relu()).mean((2, 3)))

def make():
    torch.manual_seed(0)
    return Net()
"""


# Its norms remember something, so that samples can be distilled from them.
TRAINED_NETWORK = NETWORK.replace(
    "return Net()",
    """net = Net()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.5, 1.5)
    return net""",
)


def run(*words: str | Path, **settings: Any) -> Any:
    # Threads that wait for each other cost a tiny network most of its time.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return CliRunner().invoke(app, [*map(str, words)], prog_name="ompq", **settings)
    finally:
        torch.set_num_threads(threads)


def run_json(*words: str | Path) -> dict[str, Any]:
    result = run(*words, "--json", "--quiet")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def network_file(folder: Path, text: str = NETWORK) -> str:
    (folder / "net.py").write_text(text)
    return f"{folder / 'net.py'}:make"
