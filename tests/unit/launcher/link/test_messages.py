from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.launcher.link.cause import Cause
from deepspeed.launcher.link.messages import (
    LINE_NBYTES,
    Beat,
    Done,
    Failed,
    Go,
    Greeting,
    Hello,
    LinkError,
    Message,
    Refused,
    Stop,
    decode,
    encode,
    proof_of,
    split_lines,
)

texts = st.text(max_size=50)
causes = st.builds(Cause, st.integers(1, 255), texts, st.none() | st.integers(0, 9999), st.integers(1, 31), st.booleans())
hellos = st.builds(
    Hello, st.integers(), st.none() | st.integers(), texts, st.integers(), texts, st.dictionaries(texts, texts), texts
)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Greeting, st.integers(), texts),
    hellos,
    st.builds(Refused, texts),
    st.builds(Failed, causes),
    st.builds(Stop, causes, st.booleans()),
    st.sampled_from([Go(), Beat(), Done(), Done(is_settled=True)]),
)


@given(messages)
def test_what_is_said_is_what_is_heard(message: Message) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_the_text_form() -> None:
    assert encode(Beat()) == b'{"say": "beat"}\n'
    assert encode(Stop(Cause(7, "rank 1 on host b failed", member=1))) == (
        b'{"say": "stop", "cause": {"status": 7, "text": "rank 1 on host b failed", "member": 1, "signum": 15, '
        b'"may_be_echo": false}, "is_now": false}\n'
    )


@given(st.binary(max_size=100))
def test_noise_is_no_message(noise: bytes) -> None:
    with pytest.raises(LinkError):
        decode(noise)


@pytest.mark.parametrize(
    "line",
    [
        b"GET / HTTP/1.1\r",
        b"[]",
        b"null",
        b'{"say": "no such word"}',
        b'{"say": ["beat"]}',
        b'{"say": "go", "more": 1}',
        b'{"say": "refused"}',
        b'{"say": "refused", "reason": 3}',
        b'{"say": "failed", "cause": "text"}',
        b'{"say": "failed", "cause": {"status": "7", "text": ""}}',
        b'{"say": "failed", "cause": {"status": true, "text": ""}}',
        b'{"say": "stop", "cause": {"status": 7, "text": ""}, "is_now": 1}',
        b'{"say": "greeting", "protocol": 1, "nonce": null}',
        b'{"say": "failed", "cause": {"status": 7, "text": "", "member": 1.5}}',
        b"[" * 10000,
        b'{"say": "greeting", "protocol": 1, "nonce": "\\ud800"}',
        b'{"say": "stop", "cause": {"status": 0, "text": ""}}',
        b'{"say": "stop", "cause": {"status": 256, "text": ""}}',
        b'{"say": "stop", "cause": {"status": 7, "text": "", "signum": 0}}',
        b'{"say": "stop", "cause": {"status": 7, "text": "", "signum": 9999}}',
    ],
)
def test_what_only_looks_like_a_message_is_refused(line: bytes) -> None:
    with pytest.raises(LinkError, match="is no message of a launcher"):
        decode(line)


@pytest.mark.parametrize(
    "changes",
    [{"versions": {"torch": 2}}, {"versions": {"\ud800": ""}}, {"versions": {"torch": "\ud800"}}, {"proof": "\udc80"}],
)
def test_names_and_versions_must_be_text_that_can_be_written(changes: dict[str, object]) -> None:
    hello = dataclasses.asdict(Hello(1, 0, "a", 1, "a:1", {}, ""))
    with pytest.raises(LinkError):
        decode(json.dumps({"say": "hello", **hello, **changes}).encode())


def test_lines_are_of_bounded_length() -> None:
    for letter in ("x", "\u2713", "\U0001f600", "\udc80"):
        for message in (Failed(Cause(1, letter * 100_000)), Refused(letter * 100_000)):
            assert decode(encode(message))
            assert len(encode(message)) <= LINE_NBYTES
    with pytest.raises(LinkError, match="shorter host names"):
        encode(Hello(1, 0, "x" * LINE_NBYTES, 1, "a:1", {}, ""))
    with pytest.raises(LinkError, match="no message"):
        split_lines(b"x" * LINE_NBYTES)


@given(st.lists(messages, max_size=5), st.integers(0, 200))
def test_lines_come_in_any_pieces(said: list[Message], cut: int) -> None:
    sent = b"".join(map(encode, said))
    first, rest = split_lines(sent[:cut])
    second, rest = split_lines(rest + sent[cut:])
    assert [decode(line) for line in (*first, *second)] == said
    assert rest == b""


def test_the_proof_depends_on_token_and_nonce() -> None:
    proofs = {proof_of(token, nonce) for token in ("a", "b", "") for nonce in ("1", "2")}
    assert len(proofs) == 6
