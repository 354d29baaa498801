"""The configuration of gpupoold (oslo.config), one module per group."""

from __future__ import annotations

from gpupoold.conf.load import PeerSettings, Settings, load, set_up_logging, unknown_options

__all__ = ["PeerSettings", "Settings", "load", "set_up_logging", "unknown_options"]
