"""The link's real rate and latency: both hosts send to each other at once, and then exchange single bytes.

`python probe.py listen|connect ADDRESS PORT BYTES`; prints JSON: `gbit_per_s` received while sending, `round_trip_ms`.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import threading
import time

_CHUNK = 1 << 20
_ROUND_TRIPS = 200

#: Seconds to wait for the other host.
_PATIENCE = 60.0


def _connected(role: str, address: str, port: int) -> socket.socket:
    if role == "listen":
        with socket.create_server((address, port)) as server:
            server.settimeout(_PATIENCE)
            return server.accept()[0]
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return socket.create_connection((address, port), timeout=_PATIENCE)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _receive(connection: socket.socket, wanted: int) -> None:
    buffer = bytearray(min(_CHUNK, wanted))
    while wanted:
        got = connection.recv_into(buffer, min(len(buffer), wanted))
        if not got:
            raise ConnectionError("the other host closed the connection")
        wanted -= got


def both_ways(connection: socket.socket, size: int) -> float:
    """Gbit/s of payload, for `size` bytes received while as many are sent."""
    _barrier(connection)
    chunk = bytes(_CHUNK)
    sender = threading.Thread(target=lambda: [connection.sendall(chunk) for _ in range(size // _CHUNK)])
    start = time.perf_counter()
    sender.start()
    _receive(connection, size // _CHUNK * _CHUNK)
    seconds = time.perf_counter() - start
    sender.join()
    return size // _CHUNK * _CHUNK * 8 / seconds / 1e9


def round_trip(connection: socket.socket, first: bool) -> float:
    """Median round-trip time of one byte, in milliseconds."""
    _barrier(connection)
    times = []
    for _ in range(_ROUND_TRIPS):
        start = time.perf_counter()
        if first:
            connection.sendall(b"x")
        _receive(connection, 1)
        times.append(time.perf_counter() - start)
        if not first:
            connection.sendall(b"x")
    return statistics.median(times) * 1000


def _barrier(connection: socket.socket) -> None:
    connection.sendall(b"m")
    _receive(connection, 1)


def main(role: str, address: str, port: int, size: int) -> None:
    with _connected(role, address, port) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        rate = both_ways(connection, size)
        milliseconds = round_trip(connection, role == "connect")
    print(json.dumps({"gbit_per_s": rate, "round_trip_ms": milliseconds}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
