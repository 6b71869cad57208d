"""The version of the installed package."""

from ompq.files import library_version

__version__ = library_version()
