"""Planning: pure functions of an inventory and a request. No I/O."""
