#!/bin/sh
# After the files are in place: the group that may use the GPU, the libraries' cache, the service.
set -e
getent group gpupool >/dev/null || groupadd --system gpupool
ldconfig
if [ -d /run/systemd/system ]; then
  systemctl daemon-reload
  udevadm control --reload || true
  systemctl enable --quiet gpupool-guest.service
  systemctl restart gpupool-guest.service
  udevadm trigger --subsystem-match=virtio-ports || true
fi
