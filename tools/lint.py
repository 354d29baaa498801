"""Checks (or with --fix mends) the form of the sources: ruff, mypy, clang-format, and own rules.

Own rules: no registry host names and no absolute paths of a developer's machine in tracked files,
no built files, a licence and the promised top-level files in place.
"""

from __future__ import annotations

import argparse
import pathlib
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIRED = [
    "README.md",
    "SPECIFICATION.md",
    "LICENSE",
    "setup.cfg",
    "tox.ini",
    "bindep.txt",
    ".ci/run",
]
FORBIDDEN = {
    # Written so that this file does not match its own rule.
    "registry host": re.compile(r"https?://[a-z.]*(" + "p[y]pi|p[y]thonhosted|n[p]mjs" + ")"),
    "path of one machine": re.compile(r"(?<![\w.])/(w[o]rk|f[a]rm)/(main|shared)"),
}
BUILT = re.compile(r"\.(so|o|a|whl|deb|bin|img)(\.|$)")


def tracked(*patterns: str) -> list[str]:
    output = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [line for line in output.splitlines() if (ROOT / line).is_file()]


def own_rules() -> list[str]:
    problems = [f"{name} is missing" for name in REQUIRED if not (ROOT / name).is_file()]
    for name in tracked():
        if BUILT.search(name) and not name.endswith(".gpprec"):
            problems.append(f"{name}: a built file is tracked")
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, OSError):
            continue
        for what, pattern in FORBIDDEN.items():
            problems += [
                f"{name}:{number}: {what}"
                for number, line in enumerate(text.splitlines(), 1)
                if pattern.search(line)
            ]
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fix", action="store_true", help="format the files instead")
    fix = parser.parse_args().fix
    cxx = tracked(
        "native/*.cc",
        "native/*.h",
        "tests/*.cc",
        "tests/*.h",
        "tests/*.cu",
        "tests/*.c",
        "tests/*.cpp",
    )
    checks: list[tuple[str, list[str]]] = [
        ("ruff", ["ruff", "check", *(["--fix"] if fix else []), "."]),
        ("ruff format", ["ruff", "format", *([] if fix else ["--check"]), "."]),
        ("clang-format", ["clang-format", *(["-i"] if fix else ["--dry-run", "--Werror"]), *cxx]),
        ("mypy", ["mypy"]),
    ]
    suite = ET.Element("testsuite", name="lint")
    failures = 0
    for name, command in checks:
        print(f"-- {name}", flush=True)
        case = ET.SubElement(suite, "testcase", classname="lint", name=name)
        words = command if name == "clang-format" else [sys.executable, "-m", *command]
        if subprocess.run(words, cwd=ROOT).returncode:
            failures += 1
            ET.SubElement(case, "failure", message=f"{name} found something")
    case = ET.SubElement(suite, "testcase", classname="lint", name="own rules")
    problems = own_rules()
    if problems:
        failures += 1
        print(*problems, sep="\n")
        ET.SubElement(case, "failure", message="; ".join(problems[:5]))
    results = ROOT / "build" / "results"
    results.mkdir(parents=True, exist_ok=True)
    ET.ElementTree(suite).write(results / "lint.xml")
    print("lint:", "ok" if not failures else f"{failures} checks failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
