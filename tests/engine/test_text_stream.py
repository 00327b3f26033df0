"""Text of tokens that come one by one."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.sampling.sampled_row import TextStream


def by_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are bytes: a character may be several of them."""
    return bytes(token_ids).decode(errors="replace")


def by_words(token_ids: Sequence[int]) -> str:
    """A tokenizer that puts blanks between words, and leaves special tokens (0) out."""
    return " ".join("abc"[token_id - 1] for token_id in token_ids if token_id)


@given(st.text(max_size=20))
def test_no_piece_holds_half_of_a_character(text):
    stream = TextStream(by_bytes)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.end() == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_what_never_becomes_a_character_comes_at_the_end():
    stream = TextStream(by_bytes)
    assert [stream.push(byte) for byte in b"a\xe2\x82"] == ["a", "", ""]
    assert stream.end() == "\ufffd"


@given(st.lists(st.integers(0, 3), max_size=12))
def test_blanks_between_words_and_special_tokens_are_as_in_the_whole_text(token_ids):
    stream = TextStream(by_words)
    assert "".join(map(stream.push, token_ids)) + stream.end() == by_words(token_ids)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_text_ends_before_the_first_stop_string_and_nothing_of_it_is_shown(text, stops):
    stream = TextStream(by_bytes, stops)
    shown = ""
    for byte in text.encode():
        shown += stream.push(byte)
        if stream.stopped_by is not None:
            break
    shown += stream.end()
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(stop) for stop in stops)]
    if not ends:
        assert (shown, stream.stopped_by) == (text, None)
    else:
        first = min(text[: ends[0]].find(stop) for stop in stops if stop in text[: ends[0]])
        assert shown == text[:first]
        assert stream.stopped_by in stops
