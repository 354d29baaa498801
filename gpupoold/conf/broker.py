"""[broker]: what gpupoold tells the broker of this host."""

from __future__ import annotations

from oslo_config import cfg, types

GROUP = "broker"

OPTIONS = [
    cfg.StrOpt(
        "tcp_listen",
        help="Address HOST:PORT on which clients may also connect by TCP; only a loopback address "
        "(127.0.0.1 or [::1]); port 0 takes any free one. Unset: unix socket only.",
    ),
    cfg.IntOpt(
        "warm_workers",
        default=1,
        min=0,
        max=64,
        help="How many workers are started in advance on each GPU that has slices.",
    ),
    cfg.BoolOpt(
        "warm_context",
        default=False,
        help="Let warm workers make their CUDA context in advance. A program starts faster, and "
        "each warm worker takes a context's memory on the card.",
    ),
    cfg.StrOpt(
        "worker_user",
        default="",
        help="The unprivileged user that workers run as. Empty: the broker's own user; never "
        "leave it empty where the broker runs as root and tenants are not trusted.",
    ),
    cfg.IntOpt(
        "max_sessions_per_lease",
        default=256,
        min=1,
        max=65536,
        help="How many programs may run under one lease at once.",
    ),
    cfg.IntOpt(
        "max_half_open",
        default=128,
        min=1,
        max=65536,
        help="How many connections that have not yet proven their lease are held.",
    ),
    cfg.IntOpt(
        "worker_log_bytes",
        default=1 << 20,
        min=4096,
        help="A worker's log is cut at this many bytes.",
    ),
    cfg.IntOpt(
        "kill_grace_ms",
        default=200,
        min=0,
        max=60000,
        help="Milliseconds between SIGTERM and SIGKILL when a worker is ended.",
    ),
    cfg.IntOpt(
        "worker_host_memory",
        default=4096,
        min=64,
        max=1 << 24,
        help="MiB of the host's memory that the workers of one slice may take together, for the "
        "device code, queues and objects of its programs, with their rings. The memory of "
        "simulated GPUs is not counted.",
    ),
    cfg.BoolOpt(
        "rings",
        default=True,
        help="Offer programs of this host a ring in shared memory in place of the unix socket: "
        "shorter calls and faster copies, for 8.5 MiB of memory per program and device.",
    ),
    cfg.BoolOpt(
        "regions",
        default=True,
        help="Offer programs in virtual machines a ring in the region that the machine shares with "
        "the host, in place of its port, as long as there is room in it.",
    ),
    cfg.IntOpt(
        "vsock_port",
        default=26480,
        min=0,
        max=(1 << 32) - 2,
        help="Where virtual machines reach the broker by vsock, if this host has /dev/vhost-vsock; "
        "their guests' services look there (gpupool-guest run --vsock-port). 0: not at all.",
    ),
    cfg.IntOpt(
        "spinners",
        min=0,
        max=64,
        help="How many sessions may spin for some microseconds at once on this host while they "
        "wait, which makes short calls some times faster and keeps up to two processors busy for "
        "each; the others sleep. Unset: a quarter of the "
        "processors, at least one where there are two.",
    ),
    cfg.StrOpt(
        "cgroup_parent",
        default="",
        help="A cgroup v2 directory that the broker may write to; each worker gets a group of "
        "its own below. Empty: no cgroups.",
    ),
    cfg.BoolOpt(
        "disable_seccomp",
        default=False,
        help="Run workers without their system call filter. For debugging with trusted tenants "
        "only.",
    ),
    cfg.Opt(
        "worker_environment",
        type=types.Dict(value_type=types.String()),
        default={},
        help="Further environment variables of the workers, NAME:VALUE,NAME:VALUE.",
    ),
]
