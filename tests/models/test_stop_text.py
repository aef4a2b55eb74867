"""Stop strings: the same text ends at the same place however it is cut."""

import numpy as np
import pytest

from jaxspec.models import StopText


def let_through(text, stops, sizes):
    stop = StopText(stops)
    out, at = "", 0
    for size in sizes:
        out += stop.push(text[at : at + size])
        at += size
    out += stop.push(text[at:])
    return out + stop.flush(), stop.is_stopped


def ending_by_definition(text, stops):
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def test_a_text_ends_where_its_first_complete_stop_string_begins_however_it_is_cut():
    rng = np.random.default_rng(0)
    stopped = 0
    for _ in range(3000):
        text = "".join(rng.choice(list("ab"), rng.integers(0, 12)))
        stops = ["".join(rng.choice(list("ab"), n)) for n in rng.integers(1, 5, rng.integers(0, 4))]
        wanted = ending_by_definition(text, stops)
        assert let_through(text, stops, rng.integers(0, 4, 5)) == wanted, (text, stops)
        stopped += wanted[1]
    assert 1000 < stopped < 2900


def test_only_possible_beginnings_of_stop_strings_are_held_back():
    stop = StopText(["\n\nQ:", "</s>"])
    assert [stop.push(piece) for piece in ("a\n", "\nQ", "b<", "/s", "\n")] == [
        "a",
        "",
        "\n\nQb",
        "",
        "</s",
    ]
    assert stop.flush() == "\n"
    assert not stop.is_stopped


@pytest.mark.parametrize("stops", [[""], ["a", ""], [5], [b"a"], "END"], ids=repr)
def test_an_empty_stop_string_is_an_error(stops):
    with pytest.raises(ValueError, match=r"stop string \d is .*: must be|stops is 'END': must be"):
        StopText(stops)
