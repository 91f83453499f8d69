from __future__ import annotations

import base64
import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import LaunchError
from deepspeed.launcher.hostfile import (
    ResourceError,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    parse_filter,
    parse_hostfile,
    parse_inclusion_exclusion,
    parse_resource_filter,
    select_first,
)

POOL = {"a": 4, "b": 2}
HOSTS = st.text("abcxyz0123456789-.", min_size=1, max_size=8).filter(lambda name: not name.startswith("#"))
POOLS = st.dictionaries(HOSTS, st.integers(1, 6), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("worker-0 slots=2\n# comment\n\nworker-1   slots=4 extra\n", {"worker-0": 2, "worker-1": 4}),
        ("  w0 slots=2", {"w0": 2}),
        ("w0 slots=2 # gpu", {"w0": 2}),
        ("w0\tslots=16\r\nw1 slots=1", {"w0": 16, "w1": 1}),
    ],
)
def test_a_hostfile_gives_slots_per_host(text: str, slots: dict[str, int]) -> None:
    assert parse_hostfile(text.splitlines()) == slots


@pytest.mark.parametrize(
    ("line", "correction"),
    [("w0", "w0 slots=N"), ("w0 slots=x", "w0 slots=N"), ("w0 slots = 2", "w0 slots=2"), ("w0 8", "w0 slots=8")],
)
def test_a_bad_line_is_settled_with_its_number_and_a_correction(line: str, correction: str) -> None:
    with pytest.raises(ResourceError, match="Hostfile contains a bad entry") as caught:
        parse_hostfile(["ok slots=1", "", line], "/job/hostfile")
    assert "/job/hostfile: line 3" in str(caught.value)
    assert f"write {correction!r}" in str(caught.value)


def test_every_bad_line_is_settled_at_once() -> None:
    with pytest.raises(ResourceError) as caught:
        parse_hostfile(["w0", "w1 slots=1", "w1 slots=2", "w2 slots=?"])
    text = str(caught.value)
    assert "line 1" in text
    assert "line 3: Hostfile contains multiple entries for w1 (first in line 2)" in text
    assert "line 4" in text


@pytest.mark.parametrize("text", ["", "# only\n#comments\n", "\n\n"])
def test_a_hostfile_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(ResourceError, match="Hostfile is empty or not formatted correctly"):
        parse_hostfile(text.splitlines())


def test_resource_errors_are_launch_errors_and_value_errors() -> None:
    assert issubclass(ResourceError, LaunchError)
    assert issubclass(ResourceError, ValueError)


@given(POOLS)
def test_a_written_hostfile_is_read_back_in_order(pool: dict[str, int]) -> None:
    assert list(parse_hostfile(f"{host} slots={count}" for host, count in pool.items()).items()) == list(pool.items())


def test_a_missing_hostfile_means_this_machine_and_is_warned_about_only_when_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "DeepSpeed"):
        assert fetch_hostfile(tmp_path / "none", is_required=False) is None
        assert not caplog.records
        assert fetch_hostfile(tmp_path / "none") is None
    assert "was not found" in caplog.text


def test_a_hostfile_is_read_from_disk(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("w0 slots=3\n")
    assert fetch_hostfile(str(tmp_path / "hosts")) == {"w0": 3}


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        ("a@b:1", "", {"a": [0, 1, 2, 3], "b": [1]}),
        ("b:1@b:0", "", {"b": [0, 1]}),
        ("b@a:3", "", {"a": [3], "b": [0, 1]}),
        ("a:0,0", "", {"a": [0]}),
        ("a:1@a", "", {"a": [0, 1, 2, 3]}),
        ("", "a:0,2", {"a": [1, 3], "b": [0, 1]}),
        ("", "b", {"a": [0, 1, 2, 3]}),
        ("", "a@b", {}),
        ("", "", {"a": [0, 1, 2, 3], "b": [0, 1]}),
    ],
)
def test_filters_keep_what_the_reference_says(include: str, exclude: str, kept: dict[str, list[int]]) -> None:
    result = parse_inclusion_exclusion(POOL, include, exclude)
    assert list(result.items()) == list(kept.items())
    assert parse_resource_filter({"a": [0, 1, 2, 3], "b": [0, 1]}, include, exclude) == kept


@pytest.mark.parametrize(
    ("include", "exclude", "text"),
    [
        ("c", "", "Hostname 'c' not found in hostfile; there are: a, b"),
        ("", "c:1", "Hostname 'c' not found in hostfile"),
        ("a:9", "", "No slot '9' specified on host 'a'; it has slots 0, 1, 2, 3"),
        ("a", "b", "mutually exclusive"),
        ("a:x", "", "must be integers"),
        ("a:", "", "must be integers"),
        ("a:0:1", "", "should be HOST or HOST:SLOT,SLOT"),
        ("a@@b", "", "should be HOST or HOST:SLOT,SLOT"),
    ],
)
def test_filters_that_cannot_be_meant_are_refused(include: str, exclude: str, text: str) -> None:
    with pytest.raises(ResourceError, match=text):
        parse_inclusion_exclusion(POOL, include, exclude)


def test_a_misspelt_host_is_settled_its_nearest_neighbour() -> None:
    with pytest.raises(ResourceError, match="did you mean 'worker-1'"):
        parse_inclusion_exclusion({"worker-1": 2, "other": 2}, "workr-1", "")


@given(pool=POOLS, data=st.data())
def test_include_and_exclude_of_the_same_slots_part_the_pool(pool: dict[str, int], data: st.DataObject) -> None:
    chosen = {host: data.draw(st.sets(st.integers(0, count - 1))) for host, count in pool.items()}
    text = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in chosen.items() if slots)
    kept = parse_inclusion_exclusion(pool, text, "") if text else {}
    left = parse_inclusion_exclusion(pool, "", text)
    for host, count in pool.items():
        assert kept.get(host, []) == sorted(chosen[host])
        assert sorted(kept.get(host, []) + left.get(host, []), key=int) == list(range(count))
    assert [host for host in pool if host in kept] == list(kept)


def test_a_filter_is_read_into_merged_sorted_slots() -> None:
    assert parse_filter("b:3,1@a@b:1,0") == {"b": [0, 1, 3], "a": None}


def test_counts_keep_the_first_hosts_and_slots() -> None:
    slots = {"a": [0, 1, 2, 3], "b": [0, 1], "c": [0]}
    assert select_first(slots, 2, None) == {"a": [0, 1, 2, 3], "b": [0, 1]}
    assert select_first(slots, None, 1) == {"a": [0], "b": [0], "c": [0]}
    assert select_first(slots, 1, 6) == {"a": [0, 1, 2, 3, 4, 5]}
    assert select_first(slots, None, None) == slots


@pytest.mark.parametrize(
    ("nodes", "gpus", "text"), [(4, None, "there are only 3 hosts"), (0, None, "at least 1"), (None, -2, "at least 1")]
)
def test_counts_that_cannot_be_had_are_refused(nodes: int | None, gpus: int | None, text: str) -> None:
    with pytest.raises(ResourceError, match=text):
        select_first({"a": [0], "b": [0], "c": [0]}, nodes, gpus)


def test_world_info_has_the_documented_encoding() -> None:
    info: dict[str, list[int | str]] = {"worker-0": [0, 1], "worker-1": [0, 1]}
    text = "eyJ3b3JrZXItMCI6IFswLCAxXSwgIndvcmtlci0xIjogWzAsIDFdfQ=="
    assert encode_world_info(info) == text
    assert list(decode_world_info(text).items()) == list(info.items())


@given(st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 99) | st.text()), max_size=5))
def test_world_info_survives_its_encoding(info: dict[str, list[int | str]]) -> None:
    assert list(decode_world_info(encode_world_info(info)).items()) == list(info.items())


@pytest.mark.parametrize("text", ["None", "@@", base64.urlsafe_b64encode(json.dumps([1]).encode()).decode(), "eyJhIjogMX0="])
def test_what_is_no_world_info_is_refused(text: str) -> None:
    with pytest.raises(ResourceError, match="is not the base64 of a JSON object"):
        decode_world_info(text)


def test_a_hostfile_that_is_no_text_is_an_error_and_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes(b"worker-0 slots=2\nw\xff slots=2\n")
    with pytest.raises(LaunchError, match=r"hosts is no UTF-8 \(line 2\)"):
        fetch_hostfile(tmp_path / "hosts")
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfworker-0 slots=2\r\n")
    assert fetch_hostfile(tmp_path / "hosts") == {"worker-0": 2}
