"""Which ompq this is, installed or run from its source folder."""

from importlib import metadata


def library_version() -> str:
    """Return the installed version, or ``source`` where nothing was installed."""
    try:
        return metadata.version("ompq")
    except metadata.PackageNotFoundError:
        return "source"
