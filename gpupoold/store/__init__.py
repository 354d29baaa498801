"""The state that outlives gpupoold: one SQLite file, written by nobody else."""

from __future__ import annotations

from gpupoold.store.store import Store
from gpupoold.store.transaction import Transaction

__all__ = ["Store", "Transaction"]
