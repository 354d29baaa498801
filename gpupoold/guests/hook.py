"""The socket on which libvirt's hook (etc/libvirt/hooks/qemu) asks.

One request per connection, root's only: a JSON object {"version": 1, "operation": "prepare" or
"release", "xml": the domain's} and the end of the stream; the answer is {"ok": true}, or
{"ok": false, "why": a sentence}. The requests are answered one after the other, in the order in
which they came, so that an older `release` never meets a newer `prepare`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable

from gpupoold.api.peers import credentials, not_made
from gpupoold.errors import PoolError
from gpupoold.guests.request import XML_MAX
from gpupoold.model import printable

LOG = logging.getLogger(__name__)

VERSION = 1
BACKLOG = 64
READ_SECONDS = 2.0
REQUEST_MAX = 6 * XML_MAX  # JSON may write one character as six
OPERATIONS = ("prepare", "release")

Answer = Callable[[str, str], str]


class HookServer:
    """Answers with what `answer(operation, xml)` returns: empty, or why not."""

    def __init__(self, path: str, answer: Answer) -> None:
        self._path = path
        self._answer = answer
        self._socket: socket.socket | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="hook", daemon=True)

    def start(self) -> None:
        """Listens; raises SocketError. The API's socket is the lock: a file here is a leftover."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            listener.bind(self._path)
            os.chmod(self._path, 0o600)
            listener.listen(BACKLOG)
        except OSError as error:
            listener.close()
            raise not_made(self._path, error) from None
        self._socket = listener
        self._thread.start()

    def stop(self) -> None:
        """Answers no more."""
        self._stopping = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._thread.join(timeout=3)
            self._socket.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)

    def _run(self) -> None:
        assert self._socket is not None
        while not self._stopping:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                continue
            try:
                with connection:
                    connection.settimeout(READ_SECONDS)
                    self._serve(connection)
            except OSError as error:
                LOG.warning("the hook of libvirt went away: %s", error)
            except Exception:
                LOG.exception("the hook of libvirt was not answered")

    def _serve(self, connection: socket.socket) -> None:
        uid, _ = credentials(connection)
        if uid not in (0, os.geteuid()):
            self._reply(connection, f"user {uid} may not ask")
            return
        try:
            why = self._ask(self._read(connection))
        except PoolError as error:
            why = str(error)
        except ValueError as error:
            why = f"the hook's question is not understood: {error}"
        except OSError:
            raise
        except Exception as error:
            LOG.exception("the hook's question failed")
            why = f"gpupoold failed: {type(error).__name__}: {error}"
        self._reply(connection, why)

    @staticmethod
    def _read(connection: socket.socket) -> bytes:
        data = bytearray()
        while chunk := connection.recv(1 << 16):
            data += chunk
            if len(data) > REQUEST_MAX:
                raise ValueError("it is too long")
        return bytes(data)

    def _ask(self, data: bytes) -> str:
        question = json.loads(data)
        if not isinstance(question, dict) or question.get("version") != VERSION:
            raise ValueError(f"its version is not {VERSION}")
        operation, xml = question.get("operation"), question.get("xml")
        if operation not in OPERATIONS or not isinstance(xml, str):
            raise ValueError("it has no operation or no XML")
        return self._answer(operation, xml)

    @staticmethod
    def _reply(connection: socket.socket, why: str) -> None:
        reply: dict[str, object] = {"ok": True}
        if why:
            reply = {"ok": False, "why": printable(why)}
        connection.sendall(json.dumps(reply).encode())
