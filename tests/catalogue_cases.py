"""What several files of tests share: see test_catalogue.py."""

from ompq.network.units import Choice

CHOICES = (Choice(2, 8), Choice(4, 8), Choice(8, 8))
