"""[DEFAULT]: what the host is called and where its files are."""

from __future__ import annotations

import socket

from oslo_config import cfg, types

GROUP = "DEFAULT"


def host_name(name: str) -> str:
    """The host's name as an option may have it: a machine that was given none says "(none)"."""
    try:
        return str(types.HostDomain()(name))
    except ValueError:
        return "localhost"


OPTIONS = [
    cfg.HostDomainOpt(
        "host",
        default=host_name(socket.gethostname()),
        sample_default="<the host's name>",
        help="The name of this host in the pool. On an OpenStack compute node it must be the "
        "same as [DEFAULT] host of nova.conf.",
    ),
    cfg.StrOpt(
        "state_dir",
        default="/var/lib/gpupool",
        help="Directory of the state that outlives a reboot (slices, leases). Only gpupoold "
        "writes there.",
    ),
    cfg.StrOpt(
        "run_dir",
        default="/run/gpupool",
        help="Directory of all sockets and of the lease files of running programs. Every socket's "
        "name derives from it, so several hosts can live on one machine. Must be the broker's "
        "--run-dir, and short: a socket's path has at most 107 bytes.",
    ),
    cfg.IntOpt(
        "event_limit",
        default=10000,
        min=100,
        max=1000000,
        help="How many of the latest events are kept in all. Where there are more, whoever has "
        "most loses the oldest: each user's slices, each user's programs, and the host itself.",
    ),
]
