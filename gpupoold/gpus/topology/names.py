"""IP addresses of names, in a bounded time."""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable

WAIT_SECONDS = 2.0  # for a name, from when it was asked for
KEEP_SECONDS = 10.0  # an answer, so that nobody can make us ask all the time


def _look_up(name: str) -> list[str]:
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class _Question:
    """One name that is being asked for, or was, a short time ago."""

    def __init__(self) -> None:
        self.asked = time.monotonic()
        self.answered = threading.Event()
        self.addresses: list[str] = []
        self.problem = ""

    def is_old(self) -> bool:
        return self.answered.is_set() and time.monotonic() - self.asked > KEEP_SECONDS


class Resolver:
    """Safe to use from several threads. A name that is not answered holds one thread, no more."""

    def __init__(self, look_up: Callable[[str], list[str]] = _look_up) -> None:
        """look_up: the addresses of a name, best first; raises OSError."""
        self._look_up = look_up
        self._lock = threading.Lock()
        self._questions: dict[str, _Question] = {}

    def resolve(self, names: Iterable[str]) -> dict[str, tuple[list[str], str]]:
        """For each name its addresses, best first, and why there are none.

        All together take at most WAIT_SECONDS.
        """
        questions = {name: self._ask(name) for name in dict.fromkeys(names)}
        answers = {}
        for name, question in questions.items():
            left = question.asked + WAIT_SECONDS - time.monotonic()
            if question.answered.wait(max(0.0, left)):
                answers[name] = (question.addresses, question.problem)
            else:
                answers[name] = ([], f"the name {name} was not resolved within {WAIT_SECONDS:g} s")
        return answers

    def _ask(self, name: str) -> _Question:
        with self._lock:
            question = self._questions.get(name)
            if question is not None and not question.is_old():
                return question
            question = self._questions[name] = _Question()
        try:
            question.addresses = [str(ipaddress.ip_address(name))]
        except ValueError:
            # Not of a pool of threads: the end of the process does not wait for this one.
            threading.Thread(
                target=self._answer, args=(name, question), name="resolve", daemon=True
            ).start()
        else:
            question.answered.set()
        return question

    def _answer(self, name: str, question: _Question) -> None:
        try:
            question.addresses = self._look_up(name)
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            question.problem = f"the name {name} cannot be resolved: {reason}"
        else:
            if not question.addresses:
                question.problem = f"the name {name} has no address"
        question.answered.set()
