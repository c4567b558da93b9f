"""The version of the running package."""

from importlib.metadata import PackageNotFoundError, version


def installed() -> str:
    """Return the installed version, or "0+source" if the package is not installed."""
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "0+source"


VERSION = installed()
