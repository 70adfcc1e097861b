"""What a reader of a streamed turn is shown: only ever a beginning of the content, whatever the pieces."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gspo_mega.agents.messages import StopWatch, StreamedContent, TokenText, before_stop

OPENERS = ("<think>", "<tool_call>")
STOP = 256


def decode(token_ids):
    """A tokenizer of bytes, as byte-level BPE at its finest."""
    return bytes(token_ids).decode("utf-8", "replace")


def pieces_of(token_ids, cuts):
    places = sorted({min(cut, len(token_ids)) for cut in cuts} | {0, len(token_ids)})
    return [(start, token_ids[start:end]) for start, end in itertools.pairwise(places)]


def content_of(text):
    """The content of a message: what stands before the first call or thinking, without white space at its ends."""
    places = [text.find(opener) for opener in OPENERS if opener in text]
    return text[: min(places)].strip() if places else text


@given(st.text(st.characters(exclude_categories=["Cs"])), st.lists(st.integers(0, 200)))
def test_text_in_pieces_is_the_text(text, cuts):
    streamed = TokenText(decode)
    shown = "".join(streamed.add(piece) for _, piece in pieces_of(list(text.encode()), cuts))
    assert text.startswith(shown)
    # A replacement character in the text itself cannot be told from a part of a character.
    if "�" not in text:
        assert shown == text


WORDS = st.sampled_from(["a", " ", "\n", "<", "<t", "<tool_call>", "<tool_", "call>", "<think>", "é", "😀", "th", ">"])


@given(st.lists(WORDS).map("".join), st.lists(st.integers(0, 60)), st.booleans())
def test_what_was_sent_begins_the_content(text, cuts, ends):
    """Whatever stands in the turn and however it is cut, nothing sent is taken back and nothing of it is lost."""
    token_ids = [*text.encode()] + [STOP] * ends
    streamed = StreamedContent(decode, OPENERS, [STOP])
    sent = "".join(streamed.add(start, piece) for start, piece in pieces_of(token_ids, cuts))
    assert sent == streamed.sent
    assert streamed.rest(content_of(text)) is not None
    assert sent + streamed.rest(content_of(text)) == content_of(text)


def test_content_is_sent_as_it_comes_and_held_where_a_call_may_begin():
    streamed = StreamedContent(decode, OPENERS, [STOP])
    assert streamed.add(0, list(b"Let me ")) == "Let me"
    assert streamed.add(7, list(b"see <to")) == " see"
    assert streamed.add(14, list(b"n>")) == " <ton>"
    assert streamed.add(16, list(b" <tool_call>{}")) == ""
    assert streamed.add(30, list(b"</tool_call> more")) == ""
    assert streamed.sent == "Let me see <ton>"


def test_tokens_that_are_taken_back_end_the_sending():
    streamed = StreamedContent(decode, OPENERS, [STOP])
    assert streamed.add(0, list(b"one two")) == "one two"
    assert streamed.add(4, list(b"three")) == ""
    assert streamed.add(9, list(b" four")) == ""
    assert streamed.rest("one three four") is None
    assert streamed.rest("one two four") == " four"


def test_held_text_comes_at_the_end():
    streamed = StreamedContent(decode, OPENERS, [STOP])
    streamed.hold()
    assert streamed.add(0, list(b"thinking</think> six")) == ""
    assert streamed.rest("six") == "six"


@settings(max_examples=150)
@given(
    st.text("abé😀\n", max_size=24), st.lists(st.text("abé", min_size=1, max_size=3), min_size=1, max_size=3), st.data()
)
def test_a_stop_string_ends_a_turn_at_its_last_token(said, stops, data):
    """The reference looks at the whole text after every token."""
    token_ids = list(said.encode())
    expected = next(
        (n for n in range(1, len(token_ids) + 1) if any(stop in decode(token_ids[:n]) for stop in stops)), None
    )
    assert StopWatch(decode, stops).end_of(token_ids) == expected
    watch, place = StopWatch(decode, stops), 0
    while place < len(token_ids):
        if place and data.draw(st.integers(0, 4)) == 0:
            place = data.draw(st.integers(0, place))  # a server failed: tokens are taken back
        size = data.draw(st.integers(1, 6))
        is_over = watch.add(place, token_ids[place : place + size])
        place = min(place + size, len(token_ids))
        assert is_over == (expected is not None and expected <= place)
    assert watch.end == expected


def test_a_message_ends_before_the_first_stop_string():
    assert before_stop("one, two, three", ["three", "two"]) == ("one, ", "two")
    assert before_stop("one", ["two"]) == ("one", "")
