"""Libraries that are not always installed, and how to get them."""

import importlib
from typing import Any


def require(what: str, module: str, extra: str, library: str | None = None) -> Any:
    """Import a module of a library that an extra of this package brings.

    Args:
      what: what it is needed for.
      module: the module.
      extra: the extra.
      library: the library's name where it is not the module's.

    Raises:
      ImportError: it is not installed; with the command that installs it.

    >>> require("an example", "no_such_module", "models")
    Traceback (most recent call last):
        ...
    ImportError: an example needs no_such_module: pip install -e '.[models]' in a clone of jaxspec
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = module.partition(".")[0] if library is None else library
        raise ImportError(needs(what, missing, extra)) from error


def needs(what: str, missing: str, extra: str) -> str:
    """Return the message about a library that is not installed."""
    return f"{what} needs {missing}: {install(extra)}"


def install(extra: str) -> str:
    """Return the command that installs an extra from a clone; jaxspec is on no package index."""
    return f"pip install -e '.[{extra}]' in a clone of jaxspec"
