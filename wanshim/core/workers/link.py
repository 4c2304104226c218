"""One end of the socket pair between a process and its worker: messages, bytes, and a beat while the worker is busy.

The pair has no name and no address, and only the worker inherits its end: nobody else can write what is unpickled here.
Importing this module imports no torch, so that a worker can report that it lives while it imports torch.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

_HEADER = struct.Struct("<BQ")
_BEAT, _MESSAGE, _BYTES, _DESCRIPTOR = range(4)
_PIECE = 2**24  # bytes; the limit on silence holds for each piece
_GONE = "is gone"
_SILENT = "gave no sign of life for {:g} s"


class LinkLost(Exception):
    """The process at the other end of `link` is gone or gives no sign of life; the text says which."""

    def __init__(self, link: Link, text: str) -> None:
        super().__init__(text)
        self.link = link

    @property
    def is_gone(self) -> bool:
        """Whether that process has closed its end, as it does when it ends."""
        return str(self) == _GONE


class Link:
    """One end. One thread reads; several may write.

    Args:
        silence: see `limit_silence`. By default the other process never counts as hung: a worker waits for a process
            that a debugger holds.
    """

    def __init__(self, end: socket.socket, silence: float = math.inf) -> None:
        self._end = end
        self._writing = threading.Lock()
        self._readable = select.poll()
        self._readable.register(end, select.POLLIN)
        self.limit_silence(silence)

    def limit_silence(self, seconds: float) -> None:
        """So many seconds without a byte, or without room for one, and the other process counts as hung."""
        self._silence = seconds
        self._end.settimeout(None if seconds == math.inf else seconds)

    def send(self, message: Any) -> None:
        """Send a picklable message."""
        self._send(_MESSAGE, memoryview(pickle.dumps(message, protocol=5)))

    def send_bytes(self, data: memoryview) -> None:
        """Send one-dimensional bytes, which `receive_bytes` takes."""
        self._send(_BYTES, data)

    def send_descriptor(self, descriptor: int) -> None:
        """Send a file's descriptor, which `receive_descriptor` takes; this process keeps its own."""
        with self._writing, self._named():
            self._end.sendall(_HEADER.pack(_DESCRIPTOR, 1))
            socket.send_fds(self._end, [b"-"], [descriptor])

    def beat(self) -> None:
        """Tell the other end, which waits, that this process lives."""
        self._send(_BEAT, memoryview(b""))

    def receive(self, limit: float | None = None) -> Any:
        """The next message.

        Args:
            limit: seconds to wait for it; None: for ever, as a worker waits for the next call.

        Raises:
            LinkLost: it did not come.
        """
        return pickle.loads(self._read(self._next(_MESSAGE, limit)))  # noqa: S301 - from our own process, see above

    def receive_bytes(self, out: memoryview) -> None:
        """Fill `out` with what `send_bytes` sent.

        Raises:
            LinkLost: it did not come, or has another length.
        """
        length = self._next(_BYTES, self._silence)
        if length != len(out):
            raise LinkLost(self, f"sent {length} bytes where {len(out)} were expected")
        self._fill(out)

    def receive_descriptor(self) -> int:
        """A descriptor of this process, of the file whose descriptor was sent.

        Raises:
            LinkLost: it did not come.
        """
        self._next(_DESCRIPTOR, self._silence)
        with self._named():
            data, descriptors, *_ = socket.recv_fds(self._end, 1, 1)
        if not data or not descriptors:
            raise LinkLost(self, _GONE)
        return descriptors[0]

    def close(self) -> None:
        """Close this end. The other one reads its end."""
        with contextlib.suppress(OSError):
            self._end.close()

    def _send(self, kind: int, data: memoryview) -> None:
        with self._writing, self._named():
            self._end.sendall(_HEADER.pack(kind, len(data)))
            for start in range(0, len(data), _PIECE):
                self._end.sendall(data[start : start + _PIECE])

    def _next(self, kind: int, limit: float | None) -> int:
        """The length of the next frame of this kind, past beats."""
        end = math.inf if limit is None else time.monotonic() + limit
        while True:
            left = end - time.monotonic()
            wait = min(max(0.0, left), self._silence)
            if not self._readable.poll(None if wait == math.inf else 1000 * wait):
                raise LinkLost(self, _SILENT.format(wait) if left > wait else f"did not reply within {limit:g} s")
            found, length = _HEADER.unpack(self._read(_HEADER.size))
            if found == kind:
                return int(length)
            if found != _BEAT:
                raise LinkLost(self, f"sent frame {found} where {kind} was expected")

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        self._fill(memoryview(data))
        return data

    def _fill(self, out: memoryview) -> None:
        with self._named():
            while out:
                count = self._end.recv_into(out)
                if not count:
                    raise LinkLost(self, _GONE)
                out = out[count:]

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise LinkLost(self, _SILENT.format(self._silence)) from None
        except OSError as error:
            raise LinkLost(self, _GONE) from error
