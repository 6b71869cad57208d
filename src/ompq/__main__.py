"""``python -m ompq``, for launchers such as torchrun."""

from ompq.cli.main import app

app()
