"""The programs that people run give right results, on the simulated GPU itself and through a slice,
and the same output in both ways."""

from __future__ import annotations

import re

import pytest

from tests.functional.pool import Pool
from tests.programs.catalog import (
    DRIVER_PROGRAMS,
    NOT_SUPPORTED,
    PYCUDA,
    PYTHON_PROGRAMS,
    RUNTIME_PROGRAMS,
    Program,
)
from tests.programs.toolchain import Compiler


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "ADDRESS", text)


def each(programs: list[Program]) -> pytest.MarkDecorator:
    """A test for each program, slow where the program is."""
    return pytest.mark.parametrize(
        "program",
        [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.slow else []) for p in programs],
    )


def run_both_ways(pool: Pool, program: Program, command: list[str]) -> None:
    """Runs the program with and without gpupool and compares."""
    direct = pool.direct(command, environment=program.environment)
    problem = program.problem(direct.returncode, direct.stdout)
    assert problem is None, f"on the simulated GPU itself: {problem}\n{direct.stderr}"
    remote = pool.run("main", command, environment=program.environment)
    problem = program.problem(remote.returncode, remote.stdout)
    assert problem is None, f"through a slice: {problem}\n{remote.stderr}\n{pool.logs()}"
    assert without_addresses(remote.stdout) == without_addresses(direct.stdout)


@each(RUNTIME_PROGRAMS)
def test_static_cudart_13(shared_pool: Pool, compiler: Compiler, program: Program) -> None:
    run_both_ways(shared_pool, program, program.command(compiler, "static13"))


def test_what_a_slice_does_not_have(shared_pool: Pool, compiler: Compiler) -> None:
    """Refused at the call as not supported, and not promised by the attributes."""
    remote = shared_pool.run("main", NOT_SUPPORTED.command(compiler))
    problem = NOT_SUPPORTED.problem(remote.returncode, remote.stdout)
    assert problem is None, f"{problem}\n{remote.stderr}"
    assert "cuMemAllocManaged is not supported" in remote.stderr


# The runtimes differ in how they start, load images and launch: some programs show that.
SOME = [
    p
    for p in RUNTIME_PROGRAMS
    if p.name in ("vector_add", "reduction", "stencil_f64", "streams_events", "symbols")
]


@pytest.mark.parametrize("runtime", ["shared13", "static12", "shared12"])
@pytest.mark.parametrize("program", SOME, ids=lambda p: p.name)
def test_other_cudart(
    shared_pool: Pool, compiler: Compiler, program: Program, runtime: str
) -> None:
    command = program.command(compiler, runtime)
    remote = shared_pool.run("main", command)
    problem = program.problem(remote.returncode, remote.stdout)
    assert problem is None, f"{problem}\n{remote.stderr}\n{shared_pool.logs()}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "runtime"),
    [
        pytest.param(program, runtime, id=f"{program.name}-{runtime}")
        for program in RUNTIME_PROGRAMS
        for runtime in ("shared13", "static12", "shared12")
        if program not in SOME and not (program.newest_only and runtime.endswith("12"))
    ],
)
def test_every_program_with_other_cudart(
    shared_pool: Pool, compiler: Compiler, program: Program, runtime: str
) -> None:
    test_other_cudart(shared_pool, compiler, program, runtime)


@pytest.mark.parametrize("compression", ["none", "speed", "size"])
def test_compressed_images(shared_pool: Pool, compiler: Compiler, compression: str) -> None:
    """Images that are plain, LZ4 and zstd."""
    program = Program(
        "vector_add",
        "cuda",
        flags=(f"--compress-mode={compression}",) if compression != "none" else ("-no-compress",),
    )
    remote = shared_pool.run("main", program.command(compiler))
    assert program.problem(remote.returncode, remote.stdout) is None, remote.stderr


def test_image_with_ptx_only(shared_pool: Pool, compiler: Compiler) -> None:
    program = Program("vector_add", "cuda", flags=("-arch=compute_75",))
    remote = shared_pool.run("main", program.command(compiler))
    assert program.problem(remote.returncode, remote.stdout) is None, remote.stderr


@pytest.mark.parametrize("program", DRIVER_PROGRAMS, ids=lambda p: p.name)
def test_driver_api(shared_pool: Pool, compiler: Compiler, program: Program) -> None:
    run_both_ways(shared_pool, program, program.command(compiler))


@pytest.mark.parametrize("program", DRIVER_PROGRAMS[:3], ids=lambda p: p.name)
def test_driver_api_over_tcp(shared_pool: Pool, compiler: Compiler, program: Program) -> None:
    remote = shared_pool.run(
        "main", program.command(compiler), environment={"GPUPOOL_CARRIER": "tcp"}
    )
    problem = program.problem(remote.returncode, remote.stdout)
    assert problem is None, f"{problem}\n{remote.stderr}\n{shared_pool.logs()}"


@each(PYTHON_PROGRAMS)
def test_python(shared_pool: Pool, compiler: Compiler, program: Program) -> None:
    run_both_ways(shared_pool, program, program.command(compiler))


@pytest.mark.slow
def test_pycuda(shared_pool: Pool, compiler: Compiler, pycuda_folder: str) -> None:
    command = PYCUDA.command(compiler)
    remote = shared_pool.run("main", command, environment={"PYTHONPATH": pycuda_folder})
    problem = PYCUDA.problem(remote.returncode, remote.stdout)
    assert problem is None, f"{problem}\n{remote.stderr}"


def test_every_error_of_the_table_is_reported_at_the_call(
    shared_pool: Pool, compiler: Compiler
) -> None:
    """Also the rows that CUDA leaves undefined and gpupool promises."""
    program = Program("errors", "driver", arguments=("--all",), output=None)
    command = program.command(compiler)
    remote = shared_pool.run("main", command)
    assert program.problem(remote.returncode, remote.stdout) is None, remote.stderr
    rows = re.search(r"(\d+) rows, 0 wrong", remote.stdout)
    assert rows and int(rows.group(1)) >= 60
