"""The programs that a GPU must run right, and how each is started: used by the functional tests and
by gpu-check."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.toolchain import HERE, Compiler

PRINTF_OUTPUT = """\
block 0 says hello  1.25 z 4000000000 -5000000000 beef %
block 0 says hello  2.25 z 4000000000 -5000000000 beef %
ok
"""
PRINTF_IN_ORDER = "".join(f"device {i}\nhost {i}\n" for i in range(1, 7)) + "ok\n"


@dataclass(frozen=True)
class Program:
    """A program that checks its own results: exit status 0 and `output` on standard output."""

    name: str
    kind: str  # "cuda", "driver" or "python"
    arguments: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # for nvcc
    output: str | None = "ok\n"  # None: the last line is "ok"
    needs: tuple[str, ...] = ()  # modules of a Python program
    faults: bool = False  # makes a fault on purpose, which ends its context
    environment: dict[str, str] = field(default_factory=dict)
    folder: str | None = None  # None: named after the kind
    slow: bool = False  # some ten seconds
    newest_only: bool = False  # includes headers that refuse those of an older CUDA runtime

    @property
    def source(self) -> Path:
        suffix = {"cuda": "cu", "driver": "c", "python": "py"}[self.kind]
        return HERE / (self.folder or self.kind) / f"{self.name}.{suffix}"

    def command(self, compiler: Compiler, runtime: str = "static13") -> list[str]:
        """The command line; compiles what is not compiled yet.

        Device code of a driver program that lies in a file beside it is its argument.
        """
        if self.kind == "python":
            return [sys.executable, str(self.source), *self.arguments]
        built: Path = (
            compiler.cuda(self.name, runtime, self.flags, self.source.parent.name)
            if self.kind == "cuda"
            else compiler.driver(self.name, self.source.parent.name)
        )
        if self.kind == "driver" and self.source.with_suffix(".cu").exists():
            return [str(built), str(compiler.ptx(self.name, self.source.parent.name))]
        return [str(built), *self.arguments]

    def problem(self, status: int, output: str) -> str | None:
        """What is wrong with a run of this program; None: nothing."""
        if status != 0:
            return f"exit status {status}: {output.strip()[-2000:] or '(no output)'}"
        if self.output is not None and output != self.output:
            return f"printed {output!r} instead of {self.output!r}"
        if self.output is None and output.splitlines()[-1:] != ["ok"]:
            return f"did not end with 'ok': {output!r}"
        return None


# CuPy's kernels as PTX, and none of its libraries of machine code.
CUPY = {"CUPY_COMPILE_WITH_PTX": "1", "CUPY_ACCELERATORS": ""}

RUNTIME_PROGRAMS = [
    Program("vector_add", "cuda"),
    Program("matmul", "cuda"),
    Program("reduction", "cuda"),
    Program("block_scan", "cuda"),
    Program("histogram", "cuda"),
    Program("int128", "cuda"),
    Program("torn_vectors", "cuda"),
    Program("bitonic_sort", "cuda"),
    Program("transpose", "cuda"),
    Program("nbody", "cuda"),
    Program("stencil_f64", "cuda"),
    Program("streams_events", "cuda"),
    Program("symbols", "cuda"),
    Program("default_streams", "cuda", flags=("--default-stream", "per-thread")),
    Program("printf", "cuda", output=PRINTF_OUTPUT),
    Program("printf_flush", "cuda", output=PRINTF_IN_ORDER),
    Program("runtime_errors", "cuda"),
    Program("stream_ordered", "cuda"),
    Program("callbacks", "cuda"),
    Program("graphs", "cuda"),
    Program("block_barriers", "cuda", flags=("-arch=sm_80",), newest_only=True),
    Program("arrays", "cuda"),
    Program("limits", "cuda", output=None),
    Program("out_of_bounds", "cuda", faults=True),
    # newcomer/: written from CUDA's documentation alone
    Program("spmv_csr", "cuda", folder="newcomer", newest_only=True),
    Program("game_of_life", "cuda", folder="newcomer"),
    Program("fft_shared", "cuda", folder="newcomer", newest_only=True),
    Program("compaction", "cuda", folder="newcomer", newest_only=True),
    Program("word_table", "cuda", folder="newcomer"),
    Program("integrators", "cuda", flags=("--extended-lambda",), folder="newcomer"),
    Program("mistakes", "cuda", faults=True, folder="newcomer"),
    Program("radix_by_ballots", "cuda", output=None, folder="newcomer"),
    Program("conjugate_gradient", "cuda", output=None, folder="newcomer", newest_only=True),
    Program("convolution_3d", "cuda", output=None, folder="newcomer"),
    Program("hash_and_search", "cuda", output=None, folder="newcomer"),
    Program("virtual_shapes", "cuda", output=None, folder="newcomer"),
    Program("wrong_on_purpose", "cuda", output=None, faults=True, folder="newcomer"),
    Program("thrust_and_cub", "cuda", output=None, folder="newcomer", newest_only=True, slow=True),
    Program("smith_waterman", "cuda", folder="newcomer"),
    Program("philox_pi", "cuda", folder="newcomer"),
    Program("pagerank_coop", "cuda", folder="newcomer", newest_only=True),
    Program("lu_graph_update", "cuda", folder="newcomer"),
    Program("bilateral_pitched", "cuda", folder="newcomer"),
    Program("one_mistake_each", "cuda", faults=True, folder="newcomer"),
]

DRIVER_PROGRAMS = [
    Program("vector_add", "driver"),
    Program("threads_streams", "driver"),
    Program("errors", "driver", output=None),
    Program("link", "driver"),
    Program("vmm", "driver"),
    Program("pools", "driver"),
    Program("stream_attributes", "driver"),
    Program("capture", "driver"),
    Program("graph_nodes", "driver", arguments=("host",)),
    Program("fork", "driver"),
    Program("sticky", "driver", output=None, faults=True),
    Program("loop", "driver", arguments=("5",), output="ready\nok\n"),
    Program("two_queues", "driver", folder="newcomer"),
    Program("threads_and_events", "driver", output=None, folder="newcomer"),
    Program("two_threads_life", "driver", folder="newcomer"),
]

PYTHON_PROGRAMS = [
    Program("bindings_nvrtc", "python", needs=("cuda.bindings", "numpy")),
    Program("numba_kernels", "python", needs=("numba", "numba_cuda")),
    Program("cupy_arrays", "python", needs=("cupy",), environment=CUPY),
    Program("cupy_pools", "python", needs=("cupy",), environment=CUPY),
    Program("cupy_graphs", "python", needs=("cupy",), environment=CUPY),
    Program("numba_lu", "python", needs=("numba", "numba_cuda"), folder="newcomer"),
    Program("numba_clusters", "python", needs=("numba", "numba_cuda"), folder="newcomer"),
    Program("cupy_module", "python", needs=("cupy",), environment=CUPY, folder="newcomer"),
    Program("cupy_by_hand", "python", needs=("cupy",), environment=CUPY, folder="newcomer"),
    Program("cupy_k_means", "python", needs=("cupy",), environment=CUPY, folder="newcomer"),
    *(
        Program(
            name, "python", output=None, needs=("numba", "numba_cuda"), folder="newcomer", slow=True
        )
        for name in (
            "numba_kmeans",
            "numba_ufuncs",
            "numba_pipeline",
            "numba_suffix_array",
            "numba_floyd_warshall",
            "numba_hash_join",
        )
    ),
    *(
        Program(
            name,
            "python",
            output=None,
            needs=("cupy",),
            environment=CUPY,
            folder="newcomer",
            slow=True,
        )
        for name in ("cupy_graph", "cupy_image", "cupy_components")
    ),
]

# Built from source, some minutes: only where it is installed or the long tests run.
PYCUDA = Program("pycuda_start", "python", needs=("pycuda",))

# What a slice does not have, and the simulated GPU itself partly has.
NOT_SUPPORTED = Program("not_supported", "cuda")

ALL_PROGRAMS = [*RUNTIME_PROGRAMS, *DRIVER_PROGRAMS, *PYTHON_PROGRAMS]

# Machine code only (its wheels hold no PTX): for real cards.
TORCH = Program("torch_training", "python", needs=("torch",))
