"""``python -m ompq``, for launchers such as torchrun."""

from ompq.cli import app

app()
