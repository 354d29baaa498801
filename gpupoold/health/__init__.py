"""Looks at the cards from time to time."""

from __future__ import annotations

from gpupoold.health.monitor import HealthMonitor

__all__ = ["HealthMonitor"]
