"""Both ends of a link in one process: what is sent arrives, and each way in which nothing arrives has its text."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.unit.threads import at_once
from wanshim.core.workers import link as module
from wanshim.core.workers.link import Link, LinkLost

BOUND_S = 60.0  # for a machine under load, not what anything takes
Ends = tuple[Link, Link]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = map(Link, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_messages_and_bytes_arrive_past_beats(ends: Ends) -> None:
    ours, theirs = ends
    theirs.beat()
    theirs.send(("done", 1))
    theirs.beat()
    theirs.send_bytes(memoryview(b"elements"))
    assert ours.receive(BOUND_S) == ("done", 1)
    data = bytearray(8)
    ours.receive_bytes(memoryview(data))
    assert data == b"elements"


def test_bytes_of_many_pieces_arrive_in_their_order(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 7)
    sent, data = os.urandom(100), bytearray(100)
    at_once(lambda: ends[1].send_bytes(memoryview(sent)), lambda: ends[0].receive_bytes(memoryview(data)))
    assert data == sent


def test_descriptor_is_of_the_same_file_and_the_sender_keeps_its_own(ends: Ends) -> None:
    ours, theirs = ends
    sent = os.memfd_create("test")
    theirs.send_descriptor(sent)
    theirs.send("next")
    received = ours.receive_descriptor()
    assert received != sent
    assert os.path.sameopenfile(received, sent)
    assert ours.receive(BOUND_S) == "next"
    os.close(received)
    os.close(sent)


@pytest.mark.parametrize("sent", [b"123", b"12345"])
def test_other_frame_or_other_length_than_expected_is_an_error(sent: bytes, ends: Ends) -> None:
    ours, theirs = ends
    theirs.send_bytes(memoryview(sent))
    with pytest.raises(LinkLost, match=rf"^sent {len(sent)} bytes where 4 were expected$"):
        ours.receive_bytes(memoryview(bytearray(4)))
    ours, theirs = map(Link, socket.socketpair())
    theirs.send("message")
    with pytest.raises(LinkLost, match=r"^sent frame 1 where 2 was expected$"):
        ours.receive_bytes(memoryview(bytearray(4)))


def test_reply_that_does_not_come_ends_at_its_limit_though_the_other_end_beats(ends: Ends) -> None:
    ours, theirs = ends
    ours.limit_silence(BOUND_S)
    over = threading.Event()

    def beats() -> None:
        while not over.wait(0.01):
            theirs.beat()

    def waits() -> None:
        try:
            ours.receive(0.2)
        finally:
            over.set()

    lost, _ = at_once(waits, beats)
    assert (str(lost), lost.link, lost.is_gone) == ("did not reply within 0.2 s", ours, False)
    with pytest.raises(LinkLost, match="did not reply within 0 s"):
        ours.receive(0.0)


def test_end_that_is_silent_is_named_with_the_limit_on_silence(ends: Ends) -> None:
    ours, _ = ends
    ours.limit_silence(0.1)
    begin = time.monotonic()
    for limit in (BOUND_S, None):
        with pytest.raises(LinkLost, match=r"gave no sign of life for 0\.1 s"):
            ours.receive(limit)
    assert 0.15 < time.monotonic() - begin < BOUND_S / 2


def test_end_that_stops_within_a_message_or_sends_no_descriptor_is_silent_too(ends: Ends) -> None:
    theirs, end = socket.socketpair()
    ours = Link(end, 0.1)
    for sent, receive in (
        (module._HEADER.pack(module._MESSAGE, 9) + b"half", ours.receive),
        (b"", ours.receive_descriptor),
        (b"", lambda: ours.receive_bytes(memoryview(bytearray(4)))),
    ):
        theirs.sendall(sent)
        with pytest.raises(LinkLost, match=r"^(gave no sign of life for|did not reply within) 0\.1 s$") as lost:
            receive()
        assert not lost.value.is_gone
    theirs.close()


def test_end_without_a_limit_waits_and_a_limit_can_be_taken_away(ends: Ends) -> None:
    ours, theirs = ends
    ours.limit_silence(0.01)
    ours.limit_silence(math.inf)
    later = threading.Timer(0.1, theirs.send, [("late", 1)])
    later.start()
    assert ours.receive() == ("late", 1)
    later.join()
    theirs.send("at once")
    assert ours.receive(0.0) == "at once", "what is here needs no time"


def test_end_that_takes_nothing_is_silent_too(ends: Ends) -> None:
    ours, _ = ends
    ours.limit_silence(0.1)
    with pytest.raises(LinkLost, match=r"gave no sign of life for 0\.1 s"):
        ours.send_bytes(memoryview(bytes(2**24)))


def test_end_that_was_closed_is_gone_for_whoever_reads_or_writes(ends: Ends) -> None:
    ours, theirs = ends
    theirs.close()
    theirs.close()
    for use in (ours.receive, ours.receive_descriptor, ours.beat, lambda: ours.send("message")):
        with pytest.raises(LinkLost) as lost:
            use()
        assert lost.value.is_gone


def test_end_that_closes_within_a_descriptor_is_gone() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(module._HEADER.pack(module._DESCRIPTOR, 1))
    theirs.close()
    with pytest.raises(LinkLost, match="is gone"):
        Link(ours).receive_descriptor()


def test_byte_that_brings_no_descriptor_is_not_one() -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(module._HEADER.pack(module._DESCRIPTOR, 1) + b"-")
    with pytest.raises(LinkLost):
        Link(ours).receive_descriptor()
