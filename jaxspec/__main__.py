"""`python -m jaxspec`: see `jaxspec.cli`."""

import sys


def main() -> int:
    """Run the command line; an interrupt while it is imported ends it as a later one does."""
    try:
        from jaxspec.cli import app
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return app.main()


if __name__ == "__main__":
    raise SystemExit(main())
