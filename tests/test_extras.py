"""What is not installed: every message names the command that works, and it is written once."""

import re
import tomllib
from pathlib import Path

from jaxspec import extras

ROOT = Path(__file__).parents[1]


def test_every_extra_that_a_message_names_exists_and_is_installed_from_the_clone():
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    calls = r'\b(?:needs|require)\("[^"]+", "[^"]+", "(\w+)"|\binstall\([\'"](\w+)[\'"]\)'
    for path in (*(ROOT / "jaxspec").rglob("*.py"), *(ROOT / "training").rglob("*.py")):
        text = path.read_text()
        named |= set(re.findall(calls, text))
        assert "jaxspec-decoding[" not in text, f"{path} names a distribution that no index has"
    used = {extra for pair in named for extra in pair if extra}
    assert used == {"models", "parity", "plot", "train", "tunix"} <= set(known)
    assert extras.install("models").startswith("pip install -e '.[models]' ")
