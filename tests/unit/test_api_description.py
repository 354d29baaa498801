"""The description of the CUDA driver API: consistent in itself, and the same as a real cuda.h.

The header is looked for in GPUPOOL_CUDA_INCLUDE, in PyPI's nvidia-cuda-runtime and in
/usr/local/cuda; where there is none, what needs it is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "native" / "api"
if not API.is_dir():
    pytest.skip("the sources are not here", allow_module_level=True)
sys.path.insert(0, str(API))

from generator import coverage, description, render  # noqa: E402

COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")


def cuda_include() -> Path | None:
    """A directory with a cuda.h of CUDA 13."""
    candidates = (
        [Path(os.environ["GPUPOOL_CUDA_INCLUDE"])] if "GPUPOOL_CUDA_INCLUDE" in os.environ else []
    )
    package = importlib.util.find_spec("nvidia")
    for location in package.submodule_search_locations or [] if package else []:
        candidates.append(Path(location) / "cu13" / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    for directory in candidates:
        header = directory / "cuda.h"
        if header.is_file():
            version = re.search(r"#define CUDA_VERSION (\d+)", header.read_text(errors="replace"))
            if version and int(version.group(1)) // 1000 == 13:
                return directory
    return None


needs_header = pytest.mark.skipif(
    cuda_include() is None or COMPILER is None, reason="no CUDA 13 headers or no compiler here"
)


@pytest.fixture(scope="module")
def api() -> description.Description:
    return description.load(API)


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory, api: description.Description) -> Path:
    output = tmp_path_factory.mktemp("generated")
    render.render(api, API / "templates", output)
    return output


def probe(generated: Path, *arguments: str) -> list[str]:
    program = generated / "probe"
    subprocess.run(
        [
            str(COMPILER),
            "-std=c++20",
            "-O0",
            "-w",
            "-Wl,--unresolved-symbols=ignore-all",
            f"-I{generated}",
            *arguments,
            "-o",
            str(program),
            str(generated / "api" / "abi_probe.cc"),
        ],
        check=True,
    )
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()


def header_names(include: Path, tmp_path: Path) -> set[str]:
    """All functions that cuda.h declares in any of its modes, twins included."""
    source = tmp_path / "all.c"
    source.write_text("#include <cuda.h>\n#include <cudaProfiler.h>\n")
    names: set[str] = set()
    for mode in ("DEFAULT", "CUDA_API_PER_THREAD_DEFAULT_STREAM", "__CUDA_API_VERSION_INTERNAL"):
        text = subprocess.run(
            [str(COMPILER), "-x", "c", "-E", "-P", f"-I{include}", f"-D{mode}", str(source)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        names |= set(
            re.findall(r"\bCUresult\s+(?:__attribute__\S+\s+)?(cu[A-Z]\w+)\s*\([^;{]*\)\s*;", text)
        )
    return names


@needs_header
def test_sizes_values_and_prototypes_are_those_of_cuda_h(generated: Path) -> None:
    include = cuda_include()
    ours = probe(generated)
    theirs = probe(generated, "-DGPUPOOL_PROBE_CUDA_H", f"-I{include}")
    assert len(ours) > 2000
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == []


@needs_header
def test_every_public_name_is_described(api: description.Description, tmp_path: Path) -> None:
    include = cuda_include()
    assert include is not None
    described = {f.name for f in api.functions} | {f.twin for f in api.functions if f.twin}
    real = header_names(include, tmp_path)
    version = int(
        re.search(r"#define CUDA_VERSION (\d+)", (include / "cuda.h").read_text()).group(1)
    )  # type: ignore[union-attr]
    if version == api.types["version"]:
        assert real - described == set()
    else:  # a later header may have more, never less
        assert len(real & described) > 600
    interop = {f.name for f in api.functions if f.area == "interop"}
    interop |= {f.twin for f in api.functions if f.area == "interop" and f.twin}
    assert {n for n in described - real - interop if not n.startswith("cuGraphics")} == set()


@needs_header
def test_versions_are_those_of_the_typedefs(api: description.Description) -> None:
    text = (cuda_include() / "cudaTypedefs.h").read_text()  # type: ignore[operator]
    for name, version, prefix in re.findall(r"\*PFN_(cu\w+?)_v(\d+)(_pt[ds][sz])?\)", text):
        if prefix:
            continue
        match = [f for f in api.functions if f.base == name and f.since == int(version)]
        if int(version) <= api.types["version"]:
            assert match, f"{name} of version {version} is not described"


def test_header_can_be_used_from_c_and_c_plus_plus(generated: Path, tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no compiler here")
    source = tmp_path / "use.c"
    source.write_text(
        '#include "api/cuda_abi.h"\n'
        "CUresult f(CUdeviceptr* p, const float* x) {\n"
        "  CUresult r = cuMemAlloc(p, 64);\n"
        "  return r == CUDA_SUCCESS ? cuMemcpyHtoD(*p, x, 64) : r;\n"
        "}\n"
    )
    for language in (["-x", "c", "-std=c11"], ["-x", "c++", "-std=c++20"]):
        result = tmp_path / "use.o"
        subprocess.run(
            [
                str(COMPILER),
                *language,
                "-Wall",
                "-Wextra",
                "-Werror",
                f"-I{generated}",
                "-c",
                str(source),
                "-o",
                str(result),
            ],
            check=True,
        )
        assert b"cuMemAlloc_v2" in result.read_bytes()


def test_results_have_names_and_sentences(api: description.Description) -> None:
    results = api.types["enums"]["CUresult"]
    assert results["values"].keys() == results["messages"].keys()
    assert results["values"]["CUDA_ERROR_ILLEGAL_ADDRESS"] == 700
    assert results["messages"]["CUDA_ERROR_INVALID_VALUE"] == "invalid argument"
    assert list(results["values"].values()) == sorted(results["values"].values())


def test_expressions_name_parameters(api: description.Description) -> None:
    for function in api.functions:
        names = {p.name for p in function.params}
        for parameter in function.params:
            for expression in (parameter.bytes, parameter.count):
                words = set(re.findall(r"[A-Za-z_]\w*", expression or ""))
                assert words - {"extent"} <= names, f"{function.name}: {expression}"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("op: 20\n", "op: 9999\n"), "operation number 9999"),
        (
            ("class: hand_written\n  op: 20\n", "class: local\n  op: 20\n"),
            "has no operation number",
        ),
        (("kind: devptr", "kind: pointer_to_somewhere"), "unknown direction or kind"),
        (("  base: cuMemAlloc\n", "  base: cuMemAlloc\n  colour: red\n"), "unknown key colour"),
    ],
)
def test_a_wrong_description_is_refused(
    tmp_path: Path, change: tuple[str, str], sentence: str
) -> None:
    copy = tmp_path / "api"
    shutil.copytree(API, copy, ignore=shutil.ignore_patterns("generator", "templates"))
    file = copy / "functions" / "memory.yaml"
    text = file.read_text()
    assert change[0] in text
    file.write_text(text.replace(*change))
    with pytest.raises(description.DescriptionError, match=sentence):
        description.load(copy)


def test_coverage_tells_stubs_from_functions(tmp_path: Path, api: description.Description) -> None:
    if COMPILER is None or shutil.which("nm") is None:
        pytest.skip("no compiler here")
    source = tmp_path / "library.c"
    source.write_text(
        "int gpupool_stub_cuInit(void) { return 801; }\n"
        'int cuInit(void) __attribute__((weak, alias("gpupool_stub_cuInit")));\n'
        "int gpupool_stub_cuDeviceGet(void) { return 801; }\n"
        "int cuDeviceGet(void) { return 0; }\n"
    )
    library = tmp_path / "library.so"
    subprocess.run(
        [str(COMPILER), "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
    )
    assert coverage.defined_functions(library, "nm") == {"cuDeviceGet"}
    report = coverage.coverage(api, {"client": library}, "nm")
    entry = {e["name"]: e for e in report["functions"]}
    assert entry["cuDeviceGet"]["client"] and not entry["cuInit"]["client"]
    assert any(s.startswith("cuInit: class local") for s in coverage.contradictions(report))
