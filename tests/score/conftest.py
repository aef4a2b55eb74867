"""Let the tests here import the fake model, which lies above them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
