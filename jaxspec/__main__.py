"""`python -m jaxspec`: see `jaxspec.cli`."""

from jaxspec.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
