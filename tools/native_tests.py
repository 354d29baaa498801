"""Builds the native parts with AddressSanitizer and UBSan and runs the native tests.

Exit status: that of ctest, or of the build that failed.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, help="JUnit file to write")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "native-asan")
    parser.add_argument("ctest", nargs="*", help="more arguments for ctest")
    arguments = parser.parse_args()
    configure = [
        "cmake", "-S", ROOT, "-B", arguments.build, "-G", "Ninja",
        f"-DPython3_EXECUTABLE={sys.executable}",
        "-DGPUPOOL_SANITIZE=ON", "-DGPUPOOL_TESTS=ON", "-DGPUPOOL_CLIENT_OLD_GLIBC=OFF",
    ]  # fmt: skip
    for command in (configure, ["cmake", "--build", arguments.build, "--target", "native_tests"]):
        status = subprocess.run([str(word) for word in command]).returncode
        if status:
            return status
    ctest = ["ctest", "--test-dir", arguments.build, "--output-on-failure", "--timeout", "300"]
    if arguments.results:
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        ctest += ["--output-junit", arguments.results.resolve()]
    environment = dict(os.environ, UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1")
    return subprocess.run(
        [str(word) for word in ctest + arguments.ctest], env=environment
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
