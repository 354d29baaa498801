"""A scalar reference of PTX's instructions, written apart from the interpreter, and its comparison.

Integers are Python's, floating-point values are fractions that are rounded by `rounding`. The rules
are those of the PTX ISA (Parallel Thread Execution ISA, chapter 9.7), whose sections the families
name.
"""
