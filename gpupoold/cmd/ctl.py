"""gpupoolctl's entry point."""

from __future__ import annotations

from gpupoold.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
