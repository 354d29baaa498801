"""What the driver says about the cards of this host. Only this room speaks to NVML."""

from __future__ import annotations

from gpupoold.gpus.driver import Driver, HealthReport

__all__ = ["Driver", "HealthReport"]
