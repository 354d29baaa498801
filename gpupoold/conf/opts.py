"""All options, for oslo-config-generator (entry point `oslo.config.opts`, name `gpupoold`)."""

from __future__ import annotations

import itertools
from typing import Any

from gpupoold.conf import api, base, broker, containers, gpus, libvirt, relay

GROUPS = (base, gpus, api, broker, libvirt, containers, relay)


def list_opts() -> list[tuple[str, Any]]:
    """(group, options) of every group."""
    return [(group.GROUP, itertools.chain(group.OPTIONS)) for group in GROUPS]
