import pytest

from jcb.text.guard import MARK, SpecialTokenGuard


def test_unmarked_text_is_left_alone():
    guard = SpecialTokenGuard(["<s>", "</s>"])
    assert guard.mark("plain < s > text") == "plain < s > text"
    assert SpecialTokenGuard([]).mark("<s>") == "<s>"


@pytest.mark.parametrize("text", ["<s>", "a<s></s>b", "<s<s>>", "<<s>s>"])
def test_marked_text_holds_no_token_and_nothing_else_changes(text):
    marked = SpecialTokenGuard(["<s>", "</s>"]).mark(text)
    assert "<s>" not in marked
    assert "</s>" not in marked
    assert marked.replace(MARK, "") == text


def test_overlapping_tokens_are_all_broken():
    guard = SpecialTokenGuard(["aba", "bab", "ab"])
    for text in ("ababab", "abab", "babab"):
        assert not any(token in guard.mark(text) for token in ("aba", "bab", "ab"))


def test_a_token_of_one_character_is_replaced():
    assert SpecialTokenGuard(["\x03"]).mark("a\x03b") == "a\ufffdb"


def test_values_are_marked_throughout():
    value = {"role": "user", "<s>": ["<s>", 1, None, True, {"k": ("x", "<s>")}]}
    marked = SpecialTokenGuard(["<s>"]).mark_value(value)
    broken = f"<{MARK}s>"
    assert marked == {"role": "user", broken: [broken, 1, None, True, {"k": ["x", broken]}]}


def test_a_token_cannot_be_completed_by_what_follows():
    guard = SpecialTokenGuard(["<|im_end|>"])
    for text in ("x<", "x<|im_", "x<|im_end|"):
        assert guard.mark_value(text) == text + MARK
    assert guard.mark_value("x<|im_end|>y") == f"x<{MARK}|im_end|>y"
