"""Faults of a kernel: 700, sticky, explained in the worker's log, and nobody else's business."""

from __future__ import annotations

import re
import time

from tests.functional.pool import Pool
from tests.programs.catalog import Program
from tests.programs.toolchain import Compiler


def test_fault_is_sticky_and_logged(pool: Pool, compiler: Compiler) -> None:
    good = compiler.driver("vector_add")
    with pool.started("main", [str(compiler.driver("loop")), "0"]) as neighbour:
        assert neighbour.stdout is not None
        assert neighbour.stdout.readline() == "ready\n"

        program = Program("sticky", "driver", output=None)
        faulty = pool.run("main", program.command(compiler))
        assert program.problem(faulty.returncode, faulty.stdout) is None, faulty.stderr
        address = re.search(r"address (0x[0-9a-f]+)", faulty.stdout)
        assert address is not None

        # One report of a few lines, in the form that compute-sanitizer uses; the broker writes it
        # into the log when it gets there.
        deadline = time.monotonic() + 10
        report = None
        while report is None and time.monotonic() < deadline:
            time.sleep(0.05)
            log = pool.worker_logs()
            report = re.search(r"(?:=========.*\n)*=========.*overrun.*\n(?:=========.*\n)*", log)
        assert report is not None, f"no report names the kernel:\n{log}"
        assert address.group(1) in report.group(), report.group()
        assert "thread (5,0,0) in block (1,0,0)" in report.group(), report.group()
        assert report.group() in faulty.stderr  # the tenant sees it too

        after = pool.run("main", [str(good)])
        assert (after.returncode, after.stdout) == (0, "ok\n"), after.stderr
        assert neighbour.poll() is None, "the program beside it ended"


def test_fault_found_by_the_runtime(pool: Pool, compiler: Compiler) -> None:
    faulty = pool.run("main", [str(compiler.cuda("out_of_bounds"))])
    assert (faulty.returncode, faulty.stdout) == (0, "ok\n"), faulty.stderr
    after = pool.run("main", [str(compiler.cuda("vector_add"))])
    assert (after.returncode, after.stdout) == (0, "ok\n"), after.stderr


def test_an_assertion_says_so_where_the_program_runs(pool: Pool, compiler: Compiler) -> None:
    faulty = pool.run("main", [str(compiler.cuda("assertion"))])
    assert (faulty.returncode, faulty.stdout) == (0, "ok\n"), faulty.stderr
    # The form of CUDA's message, a line of its own: file, line, function, where, what.
    message = (
        r"^(/\S*)?assertion\.cu:7: void check\(const int \*, int \*\): block: \[1,0,0\], "
        r"thread: \[3,0,0\] Assertion `i != \*limit` failed\.$"
    )
    assert len(re.findall(message, faulty.stderr, re.MULTILINE)) == 1, faulty.stderr
    assert re.search(message, pool.worker_logs(), re.MULTILINE)
    # The report names the kernel as the program does, and as the module does.
    assert "=========     at kernel check(int const*, int*) (_Z5checkPKiPi)\n" in faulty.stderr
