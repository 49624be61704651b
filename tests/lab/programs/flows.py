"""Rank 0 sends over FLOWS connections to rank 1, ROUNDS times; prints what arrived.

Usage: flows.py FLOWS OPENER SECONDS ROUNDS, where OPENER (0 or 1) is the rank that
opens the connections. Rank 1 counts, and rank 0 prints one JSON list of lists: bytes
per second of every connection in every round.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

PORT = 5555
SETTLE_S = 0.2


def connect(server: socket.socket | None, flows: int) -> list[socket.socket]:
    """Accepts at the server; without one, opens connections to the other rank's."""
    if server is not None:
        return [server.accept()[0] for _ in range(flows)]
    peer = os.environ["STRETTO_LAB_ADDRESSES"].split(",")[1 - int(os.environ["RANK"])]
    port = int(os.environ.get("FLOWS_PORT", PORT))
    connections: list[socket.socket] = []
    deadline = time.monotonic() + 20
    while len(connections) < flows:
        try:
            connections.append(socket.create_connection((peer, port)))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    return connections


def send(connection: socket.socket, seconds: float) -> None:
    piece = bytes(1 << 16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(piece)
    connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket, seconds: float, rates: list[float]) -> None:
    buffer = bytearray(1 << 18)
    connection.recv_into(buffer)
    start = time.monotonic() + SETTLE_S
    received, now = 0, 0.0
    while size := connection.recv_into(buffer):
        now = time.monotonic()
        if now > start + seconds - 2 * SETTLE_S:
            continue
        if now > start:
            received += size
            last = now
    rates.append(received / (last - start))


def main() -> None:
    flows, opener = int(sys.argv[1]), int(sys.argv[2])
    seconds, rounds = float(sys.argv[3]), int(sys.argv[4])
    rank = int(os.environ["RANK"])
    server = None
    if rank != opener:
        port = int(os.environ.get("FLOWS_PORT", PORT))
        server = socket.create_server(("", port), backlog=64)
    (report,) = connect(server, 1)
    results = []
    for _ in range(rounds):
        rates: list[float] = []
        connections = connect(server, flows)
        threads = [
            threading.Thread(target=send, args=(each, seconds))
            if rank == 0
            else threading.Thread(target=receive, args=(each, seconds, rates))
            for each in connections
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.append(rates)
        for each in connections:
            each.close()
    if rank == 1:
        report.sendall(json.dumps(results).encode())
    else:
        with report.makefile() as reader:
            print(reader.read())
    report.close()


main()
