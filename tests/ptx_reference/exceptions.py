"""What has no reference, and what the simulated GPU does not carry out, each with its reason."""

from __future__ import annotations

_FLOW = "flow of control has no value of its own: tests/native/exec/flow_test.cc"
_BARRIER = "its value depends on the whole block: tests/native/exec/flow_test.cc"
_OBJECT = "its value depends on the whole block: tests/native/exec/mbarrier_test.cc"
_STACK = "its value is an address: tests/native/exec/mbarrier_test.cc"
_SILENT = "has no result that a program could see"

#: Opcodes that the decoder knows and no family covers.
OPCODES = {
    "bra": _FLOW,
    "brx": _FLOW,
    "call": _FLOW,
    "ret": _FLOW,
    "exit": _FLOW,
    "trap": _FLOW,
    "brkpt": _FLOW,
    "bar": _BARRIER,
    "barrier": _BARRIER,
    "membar": "orders accesses: tests/native/exec/flow_test.cc",
    "fence": "orders accesses: tests/native/exec/flow_test.cc",
    "mbarrier": _OBJECT,
    "alloca": _STACK,
    "stacksave": _STACK,
    "stackrestore": _STACK,
    "nanosleep": _SILENT,
    "prefetch": _SILENT,
    "prefetchu": _SILENT,
    "discard": _SILENT,
    "applypriority": _SILENT,
    "pmevent": _SILENT,
}

#: Instructions of the families that the decoder refuses when the kernel is launched.
NOT_EXECUTED: dict[str, str] = {}
