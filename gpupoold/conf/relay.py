"""[relay]: the other hosts of the pool."""

from __future__ import annotations

from oslo_config import cfg

GROUP = "relay"

OPTIONS = [
    cfg.StrOpt(
        "certificate_file",
        help="This host's certificate (PEM, with those between it and the authority). Its subject "
        "alternative name (DNS), or else its common name, is the name of this host in the pool: "
        "[DEFAULT] host. Unset: this host has nothing to do with others.",
    ),
    cfg.StrOpt("key_file", help="The certificate's key (PEM), readable for gpupoold alone."),
    cfg.StrOpt(
        "ca_file",
        help="The certificates of the authorities that hosts of the pool are signed by (PEM). All "
        "three files are read again when they change.",
    ),
    cfg.StrOpt(
        "listen",
        help="ADDRESS:PORT where relays of other hosts reach this host's GPUs, by mutual TLS. "
        "Unset: this host lends no GPU. gpupoold itself is reached at [api] tcp_listen.",
    ),
    cfg.MultiStrOpt(
        "peer",
        default=[],
        help="Another host of the pool: NAME ADDRESS:PORT [slices=N] [compute=PERCENT] "
        "[memory=MIB], once for each. NAME is the one in its certificate, ADDRESS:PORT its [api] "
        "tcp_listen. What follows limits what this host lends it at once, all its slices together "
        "(not given: slices=0, so nothing).",
    ),
    cfg.IntOpt(
        "interruption",
        default=10,
        min=1,
        max=600,
        help="Seconds for which the connection of a session with another host may be interrupted; "
        "then the program gets a CUDA error.",
    ),
]
