"""Interfaces, addresses and routes as the kernel tells them by netlink. Only this module speaks
pyroute2."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

ATTEMPTS = 5  # at a list that changes while it is read
_LOOPBACK = 1 << 3  # IFF_LOOPBACK
#: what the kernel means by errors that say something else
_REASONS = {
    errno.EINVAL: "the routing table drops what is sent there (blackhole)",
    errno.EACCES: "the routing table prohibits it",
}
_UNICAST, _LOCAL = 1, 2  # types of routes: RTN_UNICAST, RTN_LOCAL


class NetworkError(Exception):
    """Interfaces and routes cannot be read; the message is a sentence."""


class NoRoute(Exception):
    """Nothing can be sent to an address; the message is a sentence."""


@dataclass(frozen=True)
class Link:
    """A network interface."""

    index: int
    name: str
    kind: str = ""  # of one made in software: bond, vlan, veth, tun, bridge; empty: hardware
    state: str = "up"
    mtu: int = 1500  # bytes
    loopback: bool = False
    master: int = 0  # index of the bond or bridge that it is a part of; 0: none
    parent: int = 0  # index of the one that it is on, of kind vlan and others; 0: none
    addresses: tuple[str, ...] = ()  # ADDRESS/PREFIX

    @property
    def has_address(self) -> bool:
        """Whether it has one that others than its direct neighbours can know."""
        return any(
            not ipaddress.ip_interface(address).ip.is_link_local for address in self.addresses
        )


@dataclass(frozen=True)
class Route:
    """How an address is reached."""

    link: int  # index of the outgoing interface
    gateway: str  # empty: without
    source: str
    mtu: int  # bytes; 0: the interface's
    local: bool  # the address is this host's own


class Network(Protocol):
    """Where links and routes come from; a context manager."""

    def __enter__(self) -> Network: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def links(self) -> list[Link]:
        """All interfaces; raises NetworkError."""
        ...

    def route(self, address: str) -> Route:
        """The route to an IP address; raises NoRoute, NetworkError."""
        ...


class Netlink:
    """The kernel's, of the network namespace of this process. For one thread."""

    def __init__(self) -> None:
        self._socket: Any = None

    def __enter__(self) -> Netlink:
        """Raises NetworkError."""
        try:
            from pyroute2 import IPRoute

            self._socket = IPRoute()
        except Exception as error:  # an ImportError of a half installed package is one, too
            raise NetworkError(f"the kernel cannot be asked by netlink: {error}") from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def links(self) -> list[Link]:
        """All interfaces; raises NetworkError."""
        addresses: dict[int, list[str]] = {}
        for message in self._dump("get_addr"):
            # With a peer (point to point) the interface's own is the local one.
            address = message.get_attr("IFA_LOCAL") or message.get_attr("IFA_ADDRESS")
            if address:
                found = addresses.setdefault(message["index"], [])
                found.append(f"{address}/{message['prefixlen']}")
        return [
            Link(
                index=message["index"],
                name=message.get_attr("IFLA_IFNAME"),
                kind=message.get_nested("IFLA_LINKINFO", "IFLA_INFO_KIND") or "",
                state=(message.get_attr("IFLA_OPERSTATE") or "unknown").lower(),
                mtu=message.get_attr("IFLA_MTU") or 0,
                loopback=bool(message["flags"] & _LOOPBACK),
                master=message.get_attr("IFLA_MASTER") or 0,
                # Of another network namespace it would be a number of that one.
                parent=0
                if message.get_attr("IFLA_LINK_NETNSID") is not None
                else message.get_attr("IFLA_LINK") or 0,
                addresses=tuple(addresses.get(message["index"], ())),
            )
            for message in self._dump("get_links")
        ]

    def _dump(self, method: str) -> list[Any]:
        from pyroute2.netlink.exceptions import NetlinkDumpInterrupted, NetlinkError

        for _ in range(ATTEMPTS):
            try:
                return list(getattr(self._socket, method)())
            except NetlinkDumpInterrupted:
                continue
            except (NetlinkError, OSError) as error:
                raise NetworkError(f"the kernel does not list its interfaces: {error}") from None
        raise NetworkError("this host's interfaces change all the time and cannot be listed")

    def route(self, address: str) -> Route:
        """The route to an IP address; raises NoRoute, NetworkError."""
        from pyroute2.netlink.exceptions import NetlinkError

        destination, _, scope = address.partition("%")  # fe80::1%eth0
        try:
            only = {"oif": socket.if_nametoindex(scope)} if scope else {}
        except OSError:
            raise NoRoute(f"there is no route to {address}: no interface {scope}") from None
        try:
            message = next(iter(self._socket.route("get", dst=destination, **only)))
        except NetlinkError as error:
            reason = _REASONS.get(error.code) or os.strerror(error.code)
            raise NoRoute(f"there is no route to {address}: {reason}") from None
        except (OSError, StopIteration) as error:
            raise NetworkError(f"the kernel cannot be asked for a route: {error}") from None
        link = message.get_attr("RTA_OIF")
        if message["type"] not in (_UNICAST, _LOCAL) or not link:
            raise NoRoute(f"there is no route to {address}: the kernel would drop what is sent")
        via = message.get_attr("RTA_VIA") or {}  # an IPv6 gateway of an IPv4 route
        return Route(
            link=link,
            gateway=message.get_attr("RTA_GATEWAY") or via.get("address", ""),
            source=message.get_attr("RTA_PREFSRC") or "",
            mtu=message.get_nested("RTA_METRICS", "RTAX_MTU") or 0,
            local=message["type"] == _LOCAL,
        )
