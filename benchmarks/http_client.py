"""A client of one connection that only sends a request and reads its answer, so that the server is measured."""

import re
import socket
import time
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Client:
    """A connection that stays open.

    Args:
        address: http://host:port.
    """

    def __init__(self, address: str) -> None:
        where = urlsplit(address)
        self._host, self._socket = where.netloc, socket.create_connection((where.hostname, where.port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def request(self, path: str, body: bytes | None = None) -> tuple[int, bytes, int, int]:
        """GET, or POST with a body.

        Returns:
            the status, the body of the answer, and nanoseconds of CLOCK_MONOTONIC before and after.
        """
        method = "GET" if body is None else "POST"
        head = f"{method} {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Length: {len(body or b'')}\r\n\r\n"
        message = head.encode() + (body or b"")
        start = time.perf_counter_ns()
        self._socket.sendall(message)
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0:
            answer += self._receive()
        size = end + 4 + int(_LENGTH.search(answer, 0, end)[1])
        while len(answer) < size:
            answer += self._receive()
        return int(answer[9:12]), answer[end + 4 :], start, time.perf_counter_ns()

    def _receive(self) -> bytes:
        if not (part := self._socket.recv(2**18)):
            raise ConnectionError("the server has closed the connection")
        return part
