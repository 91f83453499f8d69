"""The base of every block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import pytest
from pydantic import Field, ValidationError

from deepspeed.config.base import ConfigModel, block_of, faults_of, parse
from deepspeed.config.faults import Fault, Refusal
from deepspeed.config.values import NonNegativeWhole, PositiveWhole


class Inner(ConfigModel):
    """`outer.inner`: a block."""

    device: Literal["none", "cpu", "nvme"] = "none"
    path: str | None = None
    count: PositiveWhole = 4

    def check(self) -> Iterable[Refusal]:
        if self.device == "nvme" and self.path is None:
            yield Refusal("path", "needed with nvme", "Name one.")


class Outer(ConfigModel):
    """`outer`: a block."""

    spellings: ClassVar[Mapping[str, str]] = {"old_size": "size"}

    size: NonNegativeWhole = 5
    inner: Inner | None = None
    other: Inner = Field(default_factory=Inner)
    named: dict[str, Inner] = Field(default_factory=dict)
    several: list[Inner] = Field(default_factory=list)
    interval: PositiveWhole | Literal["auto"] = "auto"

    def check(self) -> Iterable[Refusal]:
        if self.inner is not None and self.size < 2:
            yield Refusal("size", "needed >= 2 with inner", "Raise it.")


def faults(**given: object) -> dict[str, Fault]:
    with pytest.raises(ValidationError) as error:
        Outer.model_validate(given)
    return {fault.path: fault for fault in faults_of(error.value.errors(include_url=False))}


def test_every_fault_of_every_level_is_reported_at_once() -> None:
    found = faults(
        siz=1,
        old_size=-1,
        inner={"device": "nvme", "count": "x", "cout": 3},
        named={"a": {"devic": "cpu"}},
        several=[{}, {"count": 0}],
        interval="never",
    )
    assert set(found) == {
        "siz",
        "old_size",
        "inner.cout",
        "inner.count",
        "inner.path",
        "named.a.devic",
        "several.1.count",
        "interval",
    }


def test_a_fault_says_what_was_given_what_was_needed_and_what_to_do() -> None:
    found = faults(siz=1, size=2.5, inner={"device": "nvm"}, interval=0)
    assert str(found["siz"]) == 'siz = 1: unknown key of "outer". Did you mean "size"?'
    assert str(found["size"]) == "size = 2.5: needed a whole number. Correct it, or leave it out for the default, 5."
    assert str(found["inner.device"]) == "inner.device = \"nvm\": needed 'none', 'cpu' or 'nvme'. Did you mean \"nvme\"?"
    assert found["interval"].needed == "needed a number > 0 or 'auto'"


def test_a_check_sees_a_block_that_has_another_fault() -> None:
    assert set(faults(inner={"cout": 1}, size=1)) == {"inner.cout", "size"}


def test_a_check_that_rests_on_a_wrong_value_is_left_out() -> None:
    assert set(faults(inner={}, size="x")) == {"size"}


def test_both_spellings_are_accepted_and_both_at_once_are_a_fault() -> None:
    assert Outer.model_validate({"old_size": 3}).size == Outer(size=3).size == 3
    assert 'Keep "size" alone' in faults(size=1, old_size=1)["old_size"].cure


def test_auto_and_null_mean_the_default() -> None:
    assert Outer.model_validate({"size": "auto", "inner": None, "other": None, "interval": "auto"}) == Outer()
    assert Outer.model_validate({"other": {"count": "auto"}}).other.count == 4


def test_null_is_no_number() -> None:
    assert set(faults(size=None)) == {"size"}


@pytest.mark.parametrize("value", [True, 3, "x", [1]])
def test_a_value_in_the_place_of_a_block_is_refused(value: object) -> None:
    assert "block of keys" in faults(other=value)["other"].needed


def test_instances_are_accepted_as_blocks() -> None:
    assert Outer(inner=Inner(count=2), size=2).inner == Inner(count=2)


def test_assignments_are_validated() -> None:
    outer = Outer()
    outer.size = 7
    with pytest.raises(ValidationError):
        outer.size = -1
    assert outer.size == 7


def test_the_given_dict_is_not_changed() -> None:
    given = {"old_size": 3, "inner": {"device": "auto"}}
    Outer.model_validate(given)
    assert given == {"old_size": 3, "inner": {"device": "auto"}}


def test_parse_keeps_what_is_right() -> None:
    model, errors = parse(Outer.model_validate, {"size": -1, "inner": {"count": 0, "device": "cpu"}, "interval": 3})
    assert len(errors) == 2
    assert model == Outer(inner=Inner(device="cpu"), interval=3)


def test_blocks_are_found_inside_types() -> None:
    assert [block_of(f.annotation) for f in Outer.model_fields.values()] == [None, Inner, Inner, Inner, Inner, None]
