"""What every command shares: the connection, errors, and output."""

from __future__ import annotations

import errno
import gc
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from gpupoold import errors
from gpupoold.paths import ROOT_SOCKET

TIMEOUT_SECONDS = 30
PATIENCE_SECONDS = 15  # with a socket whose queue of connections is full
#: gRPC takes the kernel's EAGAIN for a connection in the making and then finds it not connected
FULL = (errno.EAGAIN, errno.ENOTCONN)
PAUSES = (0.02, 0.5)  # between two attempts: the first, and the longest
VERBOSITY = "GRPC_VERBOSITY"


class CommandError(Exception):
    """Ends the command with a sentence and an exit status."""

    def __init__(self, sentence: str, exit_status: int = errors.EXIT_OTHER) -> None:
        super().__init__(sentence)
        self.exit_status = exit_status


class Cli:
    """The object of the click context."""

    def __init__(self, connect: str, as_json: bool) -> None:
        self.connect = connect
        self.as_json = as_json
        self._channel: Any = None
        self._stub: Any = None
        self._public = False  # the private socket did not work
        self._quieted = False  # gRPC's messages, by us and not by the user

    def close(self) -> None:
        """Closes the connection and waits, briefly, until gRPC's threads are gone.

        A thread that gRPC starts while this process becomes another program fails and says so on
        that program's standard error."""
        if self._channel is None:
            return
        self._disconnect()
        gc.collect()
        for _ in range(100):
            if len(os.listdir("/proc/self/task")) == 1:
                break
            time.sleep(0.002)
        if self._quieted:
            os.environ.pop(VERBOSITY, None)

    def _disconnect(self) -> None:
        self._channel.close()
        self._channel = self._stub = None

    def _path(self) -> str:
        """The socket; the one that only root reaches, if that is there: nobody floods it."""
        path = self._public_path()
        private = os.path.join(os.path.dirname(path), ROOT_SOCKET)
        if self._public or not os.access(private, os.W_OK):
            return path
        return private

    def _public_path(self) -> str:
        kind, _, path = self.connect.partition(":")
        if kind == "unix" and path:
            return os.path.abspath(path.removeprefix("//"))
        if self.connect.startswith("/"):
            return self.connect
        raise CommandError(
            f"--connect {self.connect}: this release speaks to gpupoold only by a unix socket "
            "(unix:PATH); HOST:PORT comes with mutual TLS in a later one",
            errors.EXIT_USAGE,
        )

    @property
    def stub(self) -> Any:
        """The service; made at the first use."""
        if self._stub is None:
            path = self._path()
            if not os.path.exists(path):
                raise CommandError(self._unreachable(path), errors.EXIT_UNREACHABLE)
            # gRPC's own messages would stand between ours.
            if VERBOSITY not in os.environ:
                os.environ[VERBOSITY] = "NONE"
                self._quieted = True
            import grpc

            from gpupoold.api import gpupool_pb2_grpc

            self._channel = grpc.insecure_channel(
                f"unix:{path}",
                options=[("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1)],
            )
            self._stub = gpupool_pb2_grpc.PoolStub(self._channel)
        return self._stub

    def _unreachable(self, path: str) -> str:
        probe = socket.socket(socket.AF_UNIX)
        try:
            probe.settimeout(2)
            probe.connect(path)
        except FileNotFoundError:
            why = "there is no such socket: is gpupoold running?"
        except ConnectionRefusedError:
            why = "nobody listens there: is gpupoold running?"
        except BlockingIOError:
            why = "too many connections wait to be accepted; try again"
        except OSError as error:
            why = error.strerror or str(error)
        else:
            why = "it does not answer (is it starting or ending, or are too many connections open?)"
        finally:
            probe.close()
        return f"gpupoold cannot be reached at unix:{path}: {why}"

    def call(self, method: str, request: Any, timeout: float | None = TIMEOUT_SECONDS) -> Any:
        """One request; raises CommandError with the daemon's sentence."""
        return self._patiently(lambda: getattr(self.stub, method)(request, timeout=timeout))

    def stream(self, method: str, request: Any) -> Iterator[Any]:
        """The answers to one request, without end; raises as `call` does."""
        import grpc

        def begin() -> tuple[Any, list[Any]]:
            answers = iter(getattr(self.stub, method)(request))
            return answers, [first for first in [next(answers, None)] if first is not None]

        answers, first = self._patiently(begin)
        yield from first
        try:
            yield from answers
        except grpc.RpcError as error:
            raise self.error(error) from None

    def _patiently(self, work: Callable[[], Any]) -> Any:
        """Does it again, for some time, as long as no connection can be made for now."""
        import grpc

        deadline = time.monotonic() + PATIENCE_SECONDS
        pause, longest = PAUSES
        while True:
            try:
                return work()
            except grpc.RpcError as error:
                # What was not sent can be sent again.
                if "failed to connect" not in (error.details() or ""):
                    raise self.error(error) from None
                full = any(os.strerror(number) in error.details() for number in FULL)
                if not full and self._path() != self._public_path():
                    self._public = True  # left by a gpupoold that was killed, or by an older one
                elif not full or time.monotonic() >= deadline:
                    raise self.error(error) from None
            # A fresh connection: gRPC by itself waits longer and longer.
            self._disconnect()
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def error(self, error: Any) -> CommandError:
        """The sentence and exit status of a gRPC error."""
        import grpc

        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNIMPLEMENTED and "Method not found" in details:
            return CommandError("this gpupoold is older and does not know the command")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return CommandError(
                f"gpupoold at {self.connect} did not answer within {TIMEOUT_SECONDS} s",
                errors.EXIT_UNREACHABLE,
            )
        if code == grpc.StatusCode.CANCELLED:
            return CommandError(
                f"gpupoold at {self.connect} ended the connection before it answered; try again",
                errors.EXIT_UNREACHABLE,
            )
        if code == grpc.StatusCode.UNAVAILABLE and not details.startswith(
            ("the broker", "programs cannot", "slice ", "libvirt ")
        ):
            return CommandError(self._unreachable(self._public_path()), errors.EXIT_UNREACHABLE)
        status = errors.EXIT_OF_STATUS.get(code.name, errors.EXIT_OTHER)
        return CommandError(details, status)

    # ---- output ---------------------------------------------------------------------------------

    def print_json(self, value: Any) -> None:
        """For programs."""
        click.echo(json.dumps(value, indent=2))

    def show(
        self,
        entries: Sequence[dict[str, Any]],
        columns: Sequence[tuple[str, str | Callable[[dict[str, Any]], str]]],
        empty: str,
    ) -> None:
        """A list: a table of (title, key or function) for people, or all of it as JSON."""
        if self.as_json:
            self.print_json(list(entries))
            return
        if not entries:
            click.echo(empty)
            return
        table([title for title, _ in columns], [_cells(entry, columns) for entry in entries])

    def show_one(self, entry: dict[str, Any]) -> None:
        """One thing: its fields one below the other, or JSON."""
        if self.as_json:
            self.print_json(entry)
            return
        width = max(len(key) for key in entry)
        for key, value in entry.items():
            click.echo(f"{key.ljust(width)}  {_cell(value)}")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(part) for part in value) or "-"
    return "-" if value in ("", None) else str(value)


def _cells(
    entry: dict[str, Any], columns: Sequence[tuple[str, str | Callable[[dict[str, Any]], str]]]
) -> list[str]:
    return [
        _cell(entry.get(source)) if isinstance(source, str) else source(entry)
        for _, source in columns
    ]


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for people: as wide as its content, also where the output is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for number, title in enumerate(titles):
        numeric = bool(rows) and all(_is_number(row[number]) for row in rows)
        shown.add_column(title, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(_plain(cell) for cell in row))
    # Lines are never cut or folded: what does not fit the terminal is for a pager or a pipe.
    wide = Console(highlight=False, markup=False, width=10000, color_system=None)
    needed = wide.measure(shown).maximum
    with wide.capture() as capture:
        wide.print(shown, width=needed)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)


def _is_number(text: str) -> bool:
    return text.rstrip(" %").replace(".", "", 1).lstrip("-").isdecimal()


def fields(message: Any, *names: str) -> dict[str, Any]:
    """The named fields of a protobuf message, in this order."""
    return {name: _value(getattr(message, name)) for name in names}


def _value(value: Any) -> Any:
    if isinstance(value, (str, bytes, int, float, bool)):
        return value
    return list(value)


def moment(seconds: float) -> str:
    """A time for people, in the local time zone."""
    import datetime

    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")


def not_in_this_release(what: str) -> CommandError:
    """The honest answer to a command of a later release."""
    return CommandError(f"{what} is not in this release")
