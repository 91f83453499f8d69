"""The reference page and the texts under fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.base import ConfigModel
from deepspeed.config.reference import reference_page
from deepspeed.config.texts import field_texts, model_text
from deepspeed.config.walk import Section, sections

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "config.md"


def test_the_page_in_docs_is_current() -> None:
    assert PAGE.read_text() == reference_page(), "run: deepspeed-config reference > docs/reference/config.md"


@pytest.mark.parametrize("section", list(sections(DeepSpeedConfig)), ids=lambda section: section.path or "top level")
def test_every_field_and_block_has_a_text(section: Section) -> None:
    texts = field_texts(section.model)
    assert set(texts) == set(section.model.model_fields)
    assert all(text.endswith(".") for text in texts.values())
    assert model_text(section.model)


def test_a_field_without_a_text_is_noticed() -> None:
    class Silent(ConfigModel):
        """`silent`: says nothing."""

        key: int = 1

    assert field_texts(Silent) == {}


def test_every_key_is_on_the_page() -> None:
    page = reference_page()
    for section in sections(DeepSpeedConfig):
        assert not section.path or f"`{section.path}`" in page
        for key in section.model.known_keys():
            assert f"`{key}`" in page
