"""A worker without a driver, for tests of the broker alone: it speaks the channel of
native/worker/channel.h and does what the client's lines say.

Lines: `charge N`, `refund N`, `bear N`, `unbear N` and `query` are passed on to the broker, and
answered with "granted limit used"; `refund` and `unbear` are not answered; `raw HEX` sends a packet
to the broker; `say TEXT` writes to the log; `exit N`; `end TEXT` ends as after a protocol error;
`stubborn` ignores SIGTERM; `pid`.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time

HEADER = struct.Struct("<IIQQQ")
SNAPSHOT = struct.Struct("<256s16sQII160iii")
BEAR, REFUND_BORNE = 25, 26
ASSIGN, ACCOUNT, READY, SNAP, CHARGE, REFUND, QUERY, ENDED = 1, 2, 16, 17, 18, 19, 20, 21
ASKED = {"charge": CHARGE, "query": QUERY, "bear": BEAR}


def send(channel: socket.socket, kind: int, value: int, payload: bytes = b"") -> None:
    channel.send(HEADER.pack(kind, len(payload), value, 0, 0) + payload)


def probe(channel: socket.socket) -> None:
    """Sends a snapshot, or says what FAKE_WORKER_PROBE_ERROR holds."""
    error = os.environ.get("FAKE_WORKER_PROBE_ERROR")
    if error:
        send(channel, SNAP, 0, error.encode())
        return
    attributes = [0] * 160
    attributes[75], attributes[76], attributes[33] = 9, 0, 200
    send(
        channel,
        SNAP,
        1,
        SNAPSHOT.pack(b"Fake GPU", bytes(16), 80 << 30, 13000, 100, *attributes, 0, -5),
    )


def serve(channel: socket.socket, client: socket.socket) -> None:
    for line in client.makefile("r"):
        word, _, rest = line.strip().partition(" ")
        if word in ASKED:
            send(channel, ASKED[word], int(rest or 0))
            kind, _, granted, limit, used = HEADER.unpack(channel.recv(4096))
            assert kind == ACCOUNT
            client.sendall(f"{granted} {limit} {used}\n".encode())
        elif word in ("refund", "unbear"):
            send(channel, REFUND if word == "refund" else REFUND_BORNE, int(rest))
        elif word == "raw":
            channel.send(bytes.fromhex(rest))
        elif word == "say":
            print(rest, flush=True)
        elif word == "exit":
            os._exit(int(rest))
        elif word == "end":
            send(channel, ENDED, 1, rest.encode())
            os._exit(4)
        elif word == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            client.sendall(b"ok\n")
        elif word == "pid":
            client.sendall(f"{os.getpid()}\n".encode())
    if "--stay" in os.environ.get("FAKE_WORKER_OPTIONS", ""):
        time.sleep(600)
    send(channel, ENDED, 0)


def main() -> None:
    channel = socket.socket(fileno=3)
    if "--probe" in sys.argv:
        return probe(channel)
    error = os.environ.get("FAKE_WORKER_START_ERROR")
    if error:
        return send(channel, READY, 0, error.encode())
    if os.environ.get("FAKE_WORKER_CRASH"):
        print("it is broken", flush=True)
        os.abort()
    send(channel, READY, 1)
    message, descriptors, _flags, _ = socket.recv_fds(channel, 4096, 1)
    if message:
        assert HEADER.unpack_from(message)[0] == ASSIGN
        client = socket.socket(fileno=descriptors[0])
        client.setblocking(True)
        serve(channel, client)


if __name__ == "__main__":
    main()
