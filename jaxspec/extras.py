"""How to get what is not installed."""


def needs(what: str, missing: str, extra: str) -> str:
    """Return a message about a library that is not installed.

    Args:
      what: what was asked for.
      missing: the library.
      extra: the extra of this package that brings it.

    >>> needs("text", "tokenizers", "models")
    "text needs tokenizers: pip install -e '.[models]' in a clone of jaxspec"
    """
    return f"{what} needs {missing}: {install(extra)}"


def install(extra: str) -> str:
    """Return the command that installs an extra: from a clone, for no package index has this one."""
    return f"pip install -e '.[{extra}]' in a clone of jaxspec"
