"""Fifty client programs at once."""

from __future__ import annotations

from tests.functional.pool import Pool, wait_for
from tests.programs.toolchain import Compiler


def test_fifty_programs_at_once(pool: Pool, compiler: Compiler) -> None:
    """All on one slice; each counts on from its own number, so that answers would be mixed up
    visibly."""
    loop, count = compiler.driver("loop"), 50
    script = (
        f"for i in $(seq {count}); do {loop} 5 >{pool.root}/out.$i 2>&1 "
        f"|| echo failed $? & done; wait; echo done"
    )
    done = pool.run("main", ["sh", "-c", script], timeout=240)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr + pool.logs()
    for i in range(1, count + 1):
        assert (pool.root / f"out.{i}").read_text() == "ready\nok\n", i
    wait_for("no session", lambda: pool.sessions() == [], 10)
    assert pool.used_mib("main") == 0
