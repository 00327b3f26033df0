"""Groups from lines: each line stands for itself."""

import io

from headrace.producers.examples import BadLine, GoodLine, read_groups

GOOD = b'{"trajectories": [{"reward": 1}]}'


def test_a_line_that_is_too_long_is_skipped_as_a_whole_and_the_next_is_read():
    long = b'{"trajectories": [' + b" " * 200 + b"]}"
    first, bad, last = read_groups(io.BytesIO(b"\n".join([GOOD, long, GOOD])), max_line=50)
    assert isinstance(first, GoodLine)
    assert isinstance(bad, BadLine)
    assert isinstance(last, GoodLine)
    assert (bad.number, bad.detail) == (2, "longer than 50 bytes")
    assert (last.number, last.end) == (3, 2 * len(GOOD) + len(long) + 2)


def test_blank_lines_are_counted_and_skipped():
    (line,) = read_groups(io.BytesIO(b"\n  \n" + GOOD + b"\n\n"))
    assert line.number == 3
