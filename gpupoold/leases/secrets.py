"""Keys that prove a lease."""

from __future__ import annotations

import secrets

KEY_BYTES = 32


def new_key() -> bytes:
    """A fresh key from the system's random source."""
    return secrets.token_bytes(KEY_BYTES)
