"""The version that is being run."""

from importlib.metadata import PackageNotFoundError, version


def installed() -> str:
    try:
        return version("baton-serve")
    except PackageNotFoundError:
        return "0+source"


VERSION = installed()
