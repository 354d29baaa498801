"""The configuration of gpupoold (oslo.config), one module per group."""

from __future__ import annotations

from gpupoold.conf.load import Settings, load, unknown_options

__all__ = ["Settings", "load", "unknown_options"]
