"""Writes etc/gpupoold/gpupoold.conf.sample from the options' definitions; --check compares."""

from __future__ import annotations

import argparse
import difflib
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
SAMPLE = ROOT / "etc" / "gpupoold" / "gpupoold.conf.sample"


def generate() -> str:
    with tempfile.TemporaryDirectory() as directory:
        output = pathlib.Path(directory) / "sample"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "oslo_config.generator",
                "--config-file",
                str(ROOT / "etc" / "gpupoold" / "config-generator.conf"),
                "--output-file",
                str(output),
            ],
            check=True,
            cwd=ROOT,
        )
        return output.read_text()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    wanted = generate()
    if not check:
        SAMPLE.write_text(wanted)
        return 0
    found = SAMPLE.read_text() if SAMPLE.is_file() else ""
    difference = list(
        difflib.unified_diff(
            found.splitlines(), wanted.splitlines(), "committed", "generated", lineterm=""
        )
    )
    suite = ET.Element("testsuite", name="genconfig")
    case = ET.SubElement(suite, "testcase", classname="genconfig", name="sample configuration")
    if difference:
        ET.SubElement(case, "failure", message="etc/gpupoold/gpupoold.conf.sample is out of date")
        print(*difference, sep="\n")
        print("run: python tools/genconfig.py")
    results = ROOT / "build" / "results"
    results.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(results / "genconfig.xml")
    print("genconfig:", "differs" if difference else "ok")
    return 1 if difference else 0


if __name__ == "__main__":
    sys.exit(main())
