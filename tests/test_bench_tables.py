"""The tables of `bench`: as they were in a pipe and on a wide terminal, one by one on a narrow one."""

import argparse
import io

import pytest

from jaxspec.bench import Measurement, Speed
from jaxspec.cli.bench import print_speeds, print_verifiers

SPEEDS = [
    Speed("pair", "plain", 1.0, 1234.5, 1.0),
    Speed("pair", "sampled tree (2, 2, 1, 1)", 2.5, 999.9, 0.81),
    Speed("other", "lookup", 3.25, 10.0, 2.0),
]
VERIFIERS = [Measurement("point-mass tree, probabilities", 16, 12.34, 10.0, 1.23)]
WIDE = """\
cpu, pair; B = 1, float32
                                  tokens/call   tokens/s  of plain
plain                                    1.00     1234.5      1.00
sampled tree (2, 2, 1, 1)                2.50      999.9      0.81

cpu, other; B = 1, float32
                                  tokens/call   tokens/s  of plain
lookup                                   3.25       10.0      2.00

cpu, V = 100, T = 5, float32; per sequence
                                    B    time us   floor us   ratio
point-mass tree, probabilities     16       12.3       10.0    1.23

"""


def printed(monkeypatch, *, is_terminal, columns):
    class Out(io.StringIO):
        def isatty(self):
            return is_terminal

    out = Out()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout", out)
    print_speeds("cpu", SPEEDS)
    print_verifiers("cpu", argparse.Namespace(vocab=100, drafted=5), VERIFIERS)
    return out.getvalue()


@pytest.mark.parametrize(("is_terminal", "columns"), [(False, 40), (True, 80), (True, 200)])
def test_tables_are_laid_out_in_columns_where_there_is_room(is_terminal, columns, monkeypatch):
    assert printed(monkeypatch, is_terminal=is_terminal, columns=columns) == WIDE


def test_on_a_narrow_terminal_every_number_is_there_and_no_line_is_too_long(monkeypatch):
    text = printed(monkeypatch, is_terminal=True, columns=40)
    assert max(map(len, text.splitlines())) <= 40
    for word in WIDE.split():
        assert word.rstrip(",;") in text
