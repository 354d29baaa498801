"""[api]: the gRPC interface."""

from __future__ import annotations

from oslo_config import cfg

GROUP = "api"

OPTIONS = [
    cfg.StrOpt(
        "tcp_listen",
        help="ADDRESS:PORT where other hosts of the pool reach this gpupoold, with mutual TLS "
        "([relay] certificate_file). Unset: none do. Users have the unix socket, gpupoold.sock in "
        "run_dir, where the caller is known from the kernel.",
    ),
    cfg.IntOpt(
        "max_connections",
        default=512,
        min=8,
        max=65536,
        help="How many connections are served at once; one tenth more is kept for root.",
    ),
    cfg.IntOpt(
        "max_connections_per_user",
        default=64,
        min=1,
        max=65536,
        help="How many connections one user other than root may have at once.",
    ),
    cfg.IntOpt(
        "worker_threads",
        default=32,
        min=2,
        max=512,
        help="How many requests are worked on at once; one user other than root has a quarter of "
        "them at most.",
    ),
    cfg.IntOpt(
        "max_slices_per_user",
        default=64,
        min=0,
        help="How many slices a user other than root may have at once; 0: none, only root makes "
        "slices.",
    ),
    cfg.IntOpt(
        "max_runs_per_user",
        default=256,
        min=1,
        help="How many programs a user other than root may have started with `gpupoolctl run` at "
        "once.",
    ),
]
