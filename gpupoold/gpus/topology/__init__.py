"""How this host is connected: network interfaces and RDMA devices with their speed and distance to
each GPU, and the route to each peer.

`distances` and `sysfs` read the hardware, `netlink` the kernel's interfaces and routes, `names`
finds the peers' addresses, and `survey` puts it together.
"""

from __future__ import annotations

from gpupoold.gpus.topology.model import (
    Distance,
    Interface,
    Path,
    PeerRoute,
    RdmaDevice,
    RdmaPort,
    Topology,
)
from gpupoold.gpus.topology.survey import Surveyor

__all__ = [
    "Distance",
    "Interface",
    "Path",
    "PeerRoute",
    "RdmaDevice",
    "RdmaPort",
    "Surveyor",
    "Topology",
]
