"""Throw-away pools for developers, the demonstration and the tests. Not used by the product."""
