"""Messages about optional dependencies."""


def needs(what: str, missing: str, extra: str) -> str:
    """Return a message about a library that is not installed but that an extra of jaxspec brings.

    >>> needs("text", "tokenizers", "models")
    "text needs tokenizers: pip install -e '.[models]' in a clone of jaxspec"
    """
    return f"{what} needs {missing}: {install(extra)}"


def install(extra: str) -> str:
    """Return the command that installs an extra from a clone; jaxspec is on no package index."""
    return f"pip install -e '.[{extra}]' in a clone of jaxspec"
