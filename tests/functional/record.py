"""Makes the golden recordings of this release: what the client library sends for a program."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))

from tests.functional import wire
from tests.functional.pool import Pool
from tests.programs.catalog import Program
from tests.programs.toolchain import Compiler

GOLDEN = Path(__file__).parent / "golden"
# PTX only: a recording needs no machine code.
PROGRAMS = (
    Program("loop", "driver", arguments=("5",), output="ready\nok\n"),
    Program("transpose", "cuda", flags=("-arch=compute_75",)),
)


def main() -> int:
    GOLDEN.mkdir(exist_ok=True)
    compiler = Compiler()
    with Pool() as pool:
        pool.slice("main")
        for program in PROGRAMS:
            file = GOLDEN / f"{program.name}-0.{wire.MINOR}.rec"
            done = pool.run(
                "main", program.command(compiler), environment={"GPUPOOL_RECORD": str(file)}
            )
            problem = program.problem(done.returncode, done.stdout)
            if problem:
                print(f"record: {program.name}: {problem} {done.stderr}", file=sys.stderr)
                return 1
            print(f"{file}: {file.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
