"""Hosts as network namespaces on one bridge, which a test makes and takes away again."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.213.0"


def run(*words: str, namespace: str = "") -> str:
    """The output of a command, in a namespace if one is given."""
    enter = ["nsenter", f"--net=/run/netns/{namespace}", "--"] if namespace else []
    done = subprocess.run([*enter, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


class Network:
    """A context manager: a namespace for each host, all on one bridge in another one."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._prefix = f"gp{os.getpid()}-"
        self.hosts = list(hosts)
        self._switch = self._prefix + "switch"

    def namespace(self, host: str) -> str:
        return self._prefix + host

    def address(self, host: str) -> str:
        return f"{NETWORK}.{self.hosts.index(host) + 1}"

    def enter(self, host: str) -> list[str]:
        """In front of a command that is to run on the host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(host)}", "--"]

    def __enter__(self) -> Network:
        try:
            run("ip", "netns", "add", self._switch)
            run("ip", "link", "add", "br0", "type", "bridge", namespace=self._switch)
            run("ip", "link", "set", "br0", "up", namespace=self._switch)
            for host in self.hosts:
                self._add(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _add(self, host: str) -> None:
        own = self.namespace(host)
        run("ip", "netns", "add", own)
        port = f"p{self.hosts.index(host)}"
        run(
            *("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", own),
            namespace=self._switch,
        )
        run("ip", "link", "set", port, "master", "br0", "up", namespace=self._switch)
        for words in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "address", "add", f"{self.address(host)}/24", "dev", "eth0"),
            ("ip", "link", "set", "eth0", "up"),
        ):
            run(*words, namespace=own)

    def __exit__(self, *_: object) -> None:
        for namespace in (*map(self.namespace, self.hosts), self._switch):
            if Path(f"/run/netns/{namespace}").exists():
                with contextlib.suppress(AssertionError):
                    run("ip", "netns", "delete", namespace)

    # ---- faults -------------------------------------------------------------------------------

    def link(self, host: str, state: str) -> None:
        """ "up" or "down": the bridge's end of the host's cable."""
        port = f"p{self.hosts.index(host)}"
        run("ip", "link", "set", port, state, namespace=self._switch)

    def drop_packets(self, host: str) -> None:
        """Nothing that comes to the host gets in any more."""
        own = self.namespace(host)
        run("nft", "add", "table", "inet", "fault", namespace=own)
        chain = "{ type filter hook input priority 0; policy accept; }"
        run("nft", "add", "chain", "inet", "fault", "in", chain, namespace=own)
        run("nft", "add", "rule", "inet", "fault", "in", "iif", "eth0", "drop", namespace=own)

    def take_packets(self, host: str) -> None:
        """They do again."""
        run("nft", "delete", "table", "inet", "fault", namespace=self.namespace(host))

    def reset_connections(self, host: str, port: int) -> None:
        """Each packet to or from this port is answered with a reset, until take_packets()."""
        own = self.namespace(host)
        run("nft", "add", "table", "inet", "fault", namespace=own)
        chain = "{ type filter hook input priority 0; policy accept; }"
        run("nft", "add", "chain", "inet", "fault", "in", chain, namespace=own)
        for side in ("dport", "sport"):
            rule = ("tcp", side, str(port), "reject", "with", "tcp", "reset")
            run("nft", "add", "rule", "inet", "fault", "in", *rule, namespace=own)
