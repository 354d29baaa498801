"""Leases: who may use which slices, proven how, and the broker that enforces it."""
