from __future__ import annotations

from deepspeed.common.wording import some


def test_the_first_texts_are_named_and_the_others_counted() -> None:
    assert some(["a", "b"], 2) == "a, b"
    assert some(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_no_text_has_a_word_too() -> None:
    assert some([], 2) == "none"
    assert some([], 2, "nothing") == "nothing"


def test_the_first_ones_alone_may_be_known_and_commas_may_be_taken() -> None:
    assert some(["a", "b"], 2, count=9) == "a, b and 7 more"
    assert some(["a on 1, 2", "b", "c"], 2, between="; ") == "a on 1, 2; b and 1 more"
