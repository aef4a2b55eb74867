"""Contexts out of the text that the bundled models were not counted from."""

import numpy as np
import pytest

from jaxspec.models import bundled_ngrams, bundled_text, split_text
from jaxspec.models.text import encode


@pytest.fixture(scope="session")
def held_out() -> np.ndarray:
    tokens = encode(split_text(bundled_text(), held_out=True), bundled_ngrams()[0].alphabet)
    return np.lib.stride_tricks.sliding_window_view(tokens, 6)[::41]
