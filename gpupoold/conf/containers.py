"""[containers]: slices for the containers of this host."""

from __future__ import annotations

from oslo_config import cfg

GROUP = "containers"

OPTIONS = [
    cfg.StrOpt(
        "cdi_dir",
        default="/var/run/cdi",
        help="Where the CDI specification of each slice made by hand is written, for `--device "
        "gpupool/slice=NAME` of podman and others; one of the directories in which they look "
        "(/etc/cdi, /var/run/cdi). Other files there are left alone. Empty: no container gets a "
        "slice.",
    ),
    cfg.ListOpt(
        "library_dirs",
        default=["/usr/lib/x86_64-linux-gnu", "/usr/lib64"],
        help="Where in a container the client libraries are mounted: directories in which the "
        "dynamic linkers of the images look by themselves. The default serves images of Debian "
        "and Ubuntu (the first) and of Red Hat, SUSE and Arch (the second).",
    ),
]
