"""Virtual machines: their requests, leases and devices. Only this package talks to libvirt."""
