"""Finds a CUDA compiler and builds the programs of this folder, each once per content.

The compiler is the one of PyPI's wheels in this Python environment, else the system's. Nothing here
needs a GPU or a driver: programs that use the driver API are linked against a libcuda.so.1 of empty
functions and find the real ones when they start.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
RUNTIMES = ("static13", "shared13", "static12", "shared12")


class ToolchainError(Exception):
    """What is missing or did not compile, in a sentence (with the compiler's output)."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: where its compiler, headers and runtime libraries are."""

    nvcc: Path
    include: Path
    library: Path
    release: str  # "13.5"

    @property
    def major(self) -> int:
        return int(self.release.split(".", maxsplit=1)[0])


@dataclass(frozen=True)
class Runtime:
    """One CUDA runtime library to link with."""

    include: Path | None  # headers that go before the compiler's own
    library: Path
    file: str


def wheel_folders() -> list[Path]:
    """`nvidia` folders of PyPI's wheels in this environment."""
    spec = importlib.util.find_spec("nvidia")
    return [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []


def find_toolkit() -> Toolkit:
    """The toolkit of PyPI's wheels, else the one on PATH or in /usr/local/cuda.

    Raises ToolchainError when there is none."""
    candidates = [folder / "cu13" / "bin" / "nvcc" for folder in wheel_folders()]
    on_path = shutil.which("nvcc")
    if on_path:
        candidates.append(Path(on_path).resolve())
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for nvcc in candidates:
        if not os.access(nvcc, os.X_OK):
            continue
        root = nvcc.resolve().parent.parent
        include = next(
            (
                p
                for p in (root / "include", *root.glob("targets/*/include"))
                if (p / "cuda.h").exists()
            ),
            None,
        )
        library = next(
            (
                p
                for p in (root / "lib64", root / "lib", *root.glob("targets/*/lib"))
                if list(p.glob("libcudart*"))
            ),
            None,
        )
        if include is None or library is None:
            continue
        output = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False)
        release = re.search(r"release (\d+\.\d+)", output.stdout)
        if release:
            return Toolkit(nvcc, include, library, release.group(1))
    raise ToolchainError("no nvcc: install tests/requirements-programs.txt or a CUDA toolkit")


def find_runtime(toolkit: Toolkit, name: str) -> Runtime:
    """The library for "static13", "shared12" and so on; ToolchainError when it is missing."""
    if name not in RUNTIMES:
        raise ToolchainError(f"unknown runtime '{name}'; known: {', '.join(RUNTIMES)}")
    linkage, major = name[:-2], name[-2:]
    file = "libcudart_static.a" if linkage == "static" else f"libcudart.so.{major}"
    places: list[tuple[Path | None, Path]] = []
    if int(major) == toolkit.major:
        places.append((None, toolkit.library))
    if major == "12":
        for folder in wheel_folders():
            root = folder / "cuda_runtime"
            places.append((root / "include", root / "lib"))
    for include, library in places:
        if (library / file).exists():
            return Runtime(include, library, file)
    raise ToolchainError(f"no {file} of CUDA {major}: install tests/requirements-programs.txt")


@dataclass
class Compiler:
    """Compiles programs into `cache`; a file is named after a hash of all that went into it."""

    cache: Path = field(
        default_factory=lambda: Path(
            os.environ.get("GPUPOOL_PROGRAM_CACHE", REPOSITORY / "build" / "programs")
        )
    )
    default_flags: tuple[str, ...] = ()  # for every CUDA program
    _toolkit: Toolkit | None = None

    @property
    def toolkit(self) -> Toolkit:
        if self._toolkit is None:
            self._toolkit = find_toolkit()
        return self._toolkit

    def cuda(
        self,
        name: str,
        runtime: str = "static13",
        flags: tuple[str, ...] = (),
        folder: str = "cuda",
    ) -> Path:
        """The executable of <folder>/<name>.cu, linked with one of RUNTIMES."""
        source = HERE / folder / f"{name}.cu"
        library = find_runtime(self.toolkit, runtime)
        options = ["-O2", "-std=c++17", "-Wno-deprecated-gpu-targets", *self.default_flags, *flags]
        if library.include is not None:
            options.append(f"-I{library.include}")
        key = self._key(
            [source, *sorted(source.parent.glob("*.h"))],
            [str(self.toolkit.nvcc), self.toolkit.release, *options],
        )
        compiled = self._build(
            f"{name}-{key}.o",
            lambda out: [str(self.toolkit.nvcc), *options, "-c", str(source), "-o", out],
        )
        where = library.library / library.file
        link_key = self._key([compiled], [str(where)])
        return self._build(
            f"{name}-{runtime}-{link_key}",
            lambda out: [
                "g++",
                str(compiled),
                "-o",
                out,
                str(where),
                f"-Wl,-rpath,{library.library}",
                *(
                    [str(library.library / "libculibos.a")]
                    if library.file.endswith(".a") and (library.library / "libculibos.a").exists()
                    else []
                ),
                "-ldl",
                "-lrt",
                "-lpthread",
            ],
        )

    def driver(self, name: str, folder: str = "driver") -> Path:
        """The executable of <folder>/<name>.c, which needs libcuda.so.1 when it starts."""
        source = HERE / folder / f"{name}.c"
        options = ["-std=gnu11", "-O1", "-Wall", "-pthread", f"-I{self.toolkit.include}"]
        stub = self.driver_stub()
        files = [source, *sorted(source.parent.glob("*.h"))]
        key = self._key(files, [self.toolkit.release, str(stub), *options])
        return self._build(
            f"driver-{name}-{key}",
            lambda out: [
                "gcc",
                *options,
                str(source),
                "-o",
                out,
                "-Wl,--no-as-needed",
                f"-L{stub.parent}",
                "-l:libcuda.so.1",
            ],
        )

    def plain(self, name: str, folder: str) -> Path:
        """The executable of <folder>/<name>.c, which has nothing to do with CUDA."""
        source = HERE / folder / f"{name}.c"
        options = ["-std=gnu11", "-O1", "-Wall", "-static"]
        return self._build(
            f"{folder}-{name}-{self._key([source], options)}",
            lambda out: ["gcc", *options, str(source), "-o", out],
        )

    def ptx(self, name: str, folder: str = "driver") -> Path:
        """The PTX of <folder>/<name>.cu, which includes nothing, for compute capability 7.5."""
        source = HERE / folder / f"{name}.cu"
        key = self._key([source], [self.toolkit.release])
        return self._build(
            f"{name}-{key}.ptx",
            lambda out: [
                str(self.toolkit.nvcc),
                "-O2",
                "-std=c++17",
                "-arch=compute_75",
                "-ptx",
                str(source),
                "-o",
                out,
            ],
        )

    def driver_stub(self) -> Path:
        """A libcuda.so.1 to link with: every name of the driver API, none with a meaning."""
        candidates = [self.toolkit.include / name for name in ("cuda.h", "cudaProfiler.h")]
        headers = [header for header in candidates if header.exists()]
        text = "".join(header.read_text() for header in headers)
        names = sorted(set(re.findall(r"\bcu[A-Z]\w*", text)))
        source = self.cache / f"stub-{self._key(headers, [])}" / "stub.c"
        source.parent.mkdir(parents=True, exist_ok=True)
        if not source.exists():
            scratch = source.with_suffix(f".{os.getpid()}")
            scratch.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
            os.replace(scratch, source)
        return self._build(
            f"{source.parent.name}/libcuda.so.1",
            lambda out: [
                *("gcc", "-shared", "-fPIC", "-w", "-fno-builtin", str(source), "-o", out),
                "-Wl,-soname,libcuda.so.1",
            ],
        )

    def _key(self, files: list[Path], words: list[str]) -> str:
        digest = hashlib.sha256("\0".join(words).encode())
        for file in files:
            digest.update(file.read_bytes())
        return digest.hexdigest()[:16]

    def _build(self, file: str, command) -> Path:
        target = self.cache / file
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.cache) as scratch:
            out = Path(scratch) / target.name
            words = command(str(out))
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise ToolchainError(f"{' '.join(words)}\nfailed:\n{done.stdout}{done.stderr}")
            os.replace(out, target)
        return target


def main() -> int:
    from tests.programs.catalog import DRIVER_PROGRAMS, RUNTIME_PROGRAMS  # needs this module

    parser = argparse.ArgumentParser(description="Compile the programs of this folder.")
    parser.add_argument("--runtime", choices=RUNTIMES, default="static13")
    parser.add_argument("name", nargs="*", help="(default: the whole catalog)")
    arguments = parser.parse_args()
    compiler = Compiler()
    known = [*RUNTIME_PROGRAMS, *DRIVER_PROGRAMS]
    try:
        for name in arguments.name or [program.name for program in known]:
            found = [program for program in known if program.name == name]
            if found:
                built = found[0].command(compiler, arguments.runtime)[0]
            elif (HERE / "driver" / f"{name}.c").exists():  # one that takes orders
                built = str(compiler.driver(name))
            else:
                raise ToolchainError(f"there is no program {name}")
            print(built, flush=True)
    except ToolchainError as error:
        print(f"toolchain: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
