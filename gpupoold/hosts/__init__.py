"""The other hosts of the pool: what is borrowed from them, and lent to them."""
