"""Contexts out of the text that the shipped models were not counted from."""

import numpy as np
import pytest

from jaxspec.models import encode, shipped_pair, shipped_text, split_text


@pytest.fixture(scope="session")
def held_out() -> np.ndarray:
    tokens = encode(split_text(shipped_text(), held_out=True), shipped_pair()[0].alphabet)
    return np.lib.stride_tricks.sliding_window_view(tokens, 6)[::41]
