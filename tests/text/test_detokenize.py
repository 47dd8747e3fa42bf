import itertools
import random
import time

import pytest

from jcb.text.detokenize import IncrementalDetokenizer
from tests.fake_model import byte_tokenizer

EMOJI = "🤖"


def stream(tokenizer, ids, step=1, **options):
    """(texts of the pushes, what finish gave, stop string, tokens used)."""
    detokenizer = IncrementalDetokenizer(tokenizer, **{"skip_special_tokens": True, **options})
    texts, used = [], 0
    for start in range(0, len(ids), step):
        delta = detokenizer.push(ids[start : start + step])
        texts.append(delta.text)
        used += delta.tokens_used
        if delta.stop_string is not None:
            assert detokenizer.finish() == ""
            assert detokenizer.text == "".join(texts)
            return texts, "", delta.stop_string, used
    last = detokenizer.finish()
    assert detokenizer.text == "".join(texts) + last
    return texts, last, None, used


def spelled(tokenizer, *pieces):
    """Ids of tokens given by their text."""
    ids = []
    for piece in pieces:
        (index,) = tokenizer.encode(piece)
        ids.append(index)
    return ids


def as_bytes(tokenizer, text):
    """Ids of the single-byte tokens that spell `text`."""
    by_bytes = {piece: i for i, piece in reversed(list(enumerate(tokenizer.vocabulary.pieces))) if len(piece) == 1}
    return [by_bytes[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("kind", ["tiny_tokenizer", "byte_fallback_tokenizer"])
def test_b055_split_characters_wait_until_they_are_whole(request, kind):
    tokenizer = request.getfixturevalue(kind)
    text = f"a{EMOJI}é日ж"
    texts, last, _, _ = stream(tokenizer, as_bytes(tokenizer, text))
    assert "".join(texts) == text
    assert last == ""
    assert "\ufffd" not in "".join(texts)
    assert texts[1:5] == ["", "", "", EMOJI]


def test_b055_a_character_never_completed_is_released_at_the_end(tiny_tokenizer):
    ids = as_bytes(tiny_tokenizer, f"a{EMOJI}")[:-1]
    texts, last, _, _ = stream(tiny_tokenizer, ids)
    assert (texts, last) == (["a", "", "", ""], "\ufffd")
    assert tiny_tokenizer.decode(ids) == "a\ufffd"


def test_b055_a_broken_character_is_replaced_as_soon_as_it_is_known(tiny_tokenizer):
    ids = as_bytes(tiny_tokenizer, EMOJI)[:2] + as_bytes(tiny_tokenizer, "x")
    assert stream(tiny_tokenizer, ids)[0] == ["", "", "\ufffdx"]


@pytest.mark.parametrize("step", [1, 2, 5])
def test_b069_streams_equal_whole_decoding_for_random_tokens(any_tokenizer, step):
    rng = random.Random(step)
    for _ in range(500):
        ids = rng.choices(range(any_tokenizer.vocab_size), k=rng.randint(0, 12))
        for skip in (True, False):
            texts, last, _, used = stream(any_tokenizer, ids, step, skip_special_tokens=skip)
            expected = any_tokenizer.decode(ids, skip_special_tokens=skip, continuation=True)
            assert "".join(texts) + last == expected
            assert used == len(ids)


def test_b069_every_token_alone_and_pairs_of_the_default_model(default_tokenizer):
    size = default_tokenizer.vocab_size
    rng = random.Random(0)
    pairs = ([rng.randrange(size), rng.randrange(size)] for _ in range(20_000))
    for ids in itertools.chain(([i] for i in range(size)), pairs):
        detokenizer = IncrementalDetokenizer(default_tokenizer, skip_special_tokens=True)
        text = "".join([detokenizer.push([i]).text for i in ids]) + detokenizer.finish()
        assert text == default_tokenizer.pipeline.decode(ids)


def test_b057_a_stop_string_over_three_tokens_is_never_begun(tiny_tokenizer):
    ids = spelled(tiny_tokenizer, " brown", " ", "f", "o", "x", "!")
    texts, last, stop, used = stream(tiny_tokenizer, ids, stop=["own fox"])
    assert ("".join(texts), last, stop, used) == (" br", "", "own fox", 5)


def test_b057_held_text_is_released_at_the_end(tiny_tokenizer):
    texts, last, stop, _ = stream(tiny_tokenizer, spelled(tiny_tokenizer, " brown", " "), stop=["own fox"])
    assert ("".join(texts), last, stop) == (" br", "own ", None)


@pytest.mark.parametrize("step", [1, 2, 3, 99])
def test_b059_a_disproved_match_is_sent_once(tiny_tokenizer, step):
    text = " Alice! Alic Alice:"
    ids = as_bytes(tiny_tokenizer, text)
    texts, last, stop, _ = stream(tiny_tokenizer, ids, step, stop=["\n", "Alice:"])
    assert ("".join(texts), last, stop) == (" Alice! Alic ", "", "Alice:")
    texts, last, stop, _ = stream(tiny_tokenizer, ids[:-1], step, stop=["\n", "Alice:"])
    assert ("".join(texts) + last, stop) == (text[:-1], None)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 99])
def test_b061_the_match_completed_first_wins_for_every_order_and_step(tiny_tokenizer, step):
    ids = tiny_tokenizer.encode("The quick brown fox is in the world")
    for stops in itertools.permutations(["brown", "own f", "fox", "quick brown"]):
        texts, _, stop, used = stream(tiny_tokenizer, ids, step, stop=stops)
        assert ("".join(texts), stop) == ("The ", "quick brown")
        assert tiny_tokenizer.decode(ids[:used]).endswith("quick brown")


def test_b061_the_first_of_repeated_matches_counts(tiny_tokenizer):
    ids = as_bytes(tiny_tokenizer, "a;b;c;")
    for step in (1, 2, 6):
        texts, _, stop, used = stream(tiny_tokenizer, ids, step, stop=[";"])
        assert ("".join(texts), stop, used) == ("a", ";", 2)


def test_text_behind_the_stop_string_in_the_same_token_is_dropped(tiny_tokenizer):
    ids = spelled(tiny_tokenizer, " the", " capital")
    assert stream(tiny_tokenizer, ids, stop=["ap"])[0] == [" the", " c"]


def test_the_stop_string_can_be_kept(tiny_tokenizer):
    ids = tiny_tokenizer.encode("The quick brown fox")
    texts, last, stop, _ = stream(tiny_tokenizer, ids, stop=["ick br"], include_stop=True)
    assert ("".join(texts), last, stop) == ("The quick br", "", "ick br")


def test_nothing_is_read_after_a_stop(tiny_tokenizer):
    detokenizer = IncrementalDetokenizer(tiny_tokenizer, skip_special_tokens=True, stop=["a"])
    assert detokenizer.push(as_bytes(tiny_tokenizer, "bac")) == ("b", "a", 2)
    assert detokenizer.push(as_bytes(tiny_tokenizer, "d")) == ("", None, 0)
    assert detokenizer.finish() == ""


def test_stop_strings_wait_for_min_tokens(tiny_tokenizer):
    ids = as_bytes(tiny_tokenizer, "xaxaxa")
    texts, _, stop, used = stream(tiny_tokenizer, ids, stop=["xa"], min_tokens=3)
    assert ("".join(texts), stop, used) == ("xaxa", "xa", 6)


def test_a_stop_string_may_hold_characters_that_tokens_split(tiny_tokenizer):
    ids = as_bytes(tiny_tokenizer, f"hi {EMOJI}!")
    texts, _, stop, used = stream(tiny_tokenizer, ids, stop=[f"{EMOJI}"])
    assert ("".join(texts), stop, used) == ("hi ", EMOJI, 7)


def test_b139_special_tokens_are_skipped_or_shown(tiny_tokenizer):
    ids = tiny_tokenizer.encode("Hello<|im_end|> world<|im_start|>")
    assert "".join(stream(tiny_tokenizer, ids)[0]) == "Hello world"
    shown = stream(tiny_tokenizer, ids, skip_special_tokens=False)[0]
    assert "".join(shown) == "Hello<|im_end|> world<|im_start|>"


def test_b139_a_skipped_token_does_not_hide_a_stop_string(tiny_tokenizer):
    ids = [*tiny_tokenizer.encode("ab"), tiny_tokenizer.eos_token_ids[0], *tiny_tokenizer.encode("cd")]
    texts, _, stop, _ = stream(tiny_tokenizer, ids, stop=["bc"])
    assert ("".join(texts), stop) == ("a", "bc")


def test_random_answers_with_stop_strings_equal_cutting_the_whole_text(tiny_tokenizer):
    rng = random.Random(0)
    words = [*"ab\n é", EMOJI, " the", " capital"]
    for _ in range(1_000):
        text = "".join(rng.choices(words, k=rng.randint(1, 12)))
        ids = tiny_tokenizer.encode(text) if rng.random() < 0.5 else as_bytes(tiny_tokenizer, text)
        stops = ["".join(rng.choices(words, k=rng.randint(1, 2))) for _ in range(rng.randint(1, 3))]
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        texts, last, stop, _ = stream(tiny_tokenizer, ids, rng.randint(1, 4), stop=stops)
        if not ends:
            assert ("".join(texts) + last, stop) == (text, None)
        else:
            longest = max((s for s in stops if text[: min(ends)].endswith(s)), key=len)
            assert ("".join(texts), stop) == (text[: min(ends)].removesuffix(longest), longest)


def test_continuation_of_a_prompt_keeps_its_first_space(byte_fallback_tokenizer):
    ids = byte_fallback_tokenizer.encode("he a")
    assert "".join(stream(byte_fallback_tokenizer, ids)[0]) == " he a"


def test_negative_ids_are_refused(any_tokenizer):
    detokenizer = IncrementalDetokenizer(any_tokenizer, skip_special_tokens=True)
    with pytest.raises(ValueError, match="-1"):
        detokenizer.push([-1])


def test_unknown_decoders_give_up_waiting_for_a_real_replacement_character(tiny_tokenizer):
    from tokenizers import Tokenizer as Pipeline
    from tokenizers import decoders

    from jcb.text.tokenizer import Tokenizer

    pipeline = Pipeline.from_str(tiny_tokenizer.pipeline.to_str())
    pipeline.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    tokenizer = Tokenizer(pipeline, config={})
    assert not tokenizer.vocabulary.exact
    ids = as_bytes(tiny_tokenizer, f"é{EMOJI}" + "\ufffd" * 40 + "ab")
    texts, last, _, _ = stream(tokenizer, ids)
    assert texts[:6] == ["", "é", "", "", "", EMOJI]
    assert "".join(texts) + last == tokenizer.decode(ids)


def test_cost_per_token_is_small_and_does_not_grow(default_tokenizer):
    ids = default_tokenizer.encode("The quick brown fox jumps over the lazy dog, and then some more.\n" * 200)

    def seconds(count):
        detokenizer = IncrementalDetokenizer(default_tokenizer, skip_special_tokens=True, stop=["\n\nUser:", "</s>"])
        start = time.perf_counter()
        for index in ids[:count]:
            detokenizer.push([index])
        return (time.perf_counter() - start) / count

    short, whole = min(seconds(200) for _ in range(5)), min(seconds(len(ids)) for _ in range(5))
    assert whole < 50e-6  # about 2 on an idle core
    assert whole < 5 * short


def test_stop_strings_are_not_looked_for_where_they_may_not_stop():
    """A grammar may say so; what was held back is given out, and a stop string cannot reach across."""
    tokenizer = byte_tokenizer()
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, stop=("stop",))
    assert detokenizer.push(list(b"a stop")[:4]).text == "a "
    assert detokenizer.push([ord("o")], may_stop=False) == ("sto", None, 1)
    assert detokenizer.push([ord("p")]) == ("p", None, 1)
    assert detokenizer.push(list(b"stop"), may_stop=False) == ("stop", None, 4)
    assert detokenizer.push(list(b"stop")).stop_string == "stop"
