"""[libvirt]: virtual machines of this host that get slices."""

from __future__ import annotations

from oslo_config import cfg

GROUP = "libvirt"

OPTIONS = [
    cfg.StrOpt(
        "uri",
        help="Where libvirt is, for instance qemu:///system. Unset: no virtual machine gets a "
        "slice. Set: needs the Python package libvirt-python (pip install 'gpupool[libvirt]') in "
        "a version that libvirt's library knows.",
    ),
    cfg.BoolOpt(
        "attach_devices",
        default=True,
        help="Attach the control port and the shared region to a virtual machine that has a "
        "lease. Off: leases are granted and ended, and the machines are left as they are.",
    ),
    cfg.IntOpt(
        "region_size",
        default=16,
        min=1,
        max=1024,
        help="MiB of the shared region of each virtual machine with a lease, a power of two. It "
        "is memory of the host.",
    ),
    cfg.StrOpt(
        "region_group",
        default="kvm",
        help="The group that QEMU runs as, which may then open the region. Empty: gpupoold's own.",
    ),
    cfg.StrOpt(
        "qemu_pid_dir",
        default="/run/libvirt/qemu",
        help="Where libvirt writes the process numbers of its QEMUs (NAME.pid). A virtual machine "
        "of which it cannot be told is not served by vsock.",
    ),
    cfg.IntOpt(
        "interval",
        default=30,
        min=1,
        max=3600,
        help="Seconds between two looks at all virtual machines. Events of libvirt lead to a look "
        "at once; this is for what no event told.",
    ),
]
