"""Carries out cases on the simulated driver and compares the results with the reference's."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .case import Accept, Case
from .execute import ALL_LANES, MASKS
from .module import module
from .operands import operand_rows

WARP = 32
#: GPUPOOL_SIMGPU_ISA for each instruction-set level; "" is the best one of this processor.
LEVELS = ("", "baseline")
MACHINE = '[[gpu]]\nname = "reference"\nmemory_mib = 1024\ncompute_capability = "8.6"\n'
KERNELS_OF_A_MODULE = 200
#: Of one case, how many differences are told.
TOLD = 3


@dataclass
class Outcome:
    """What differed, and which instructions the driver did not carry out."""

    differences: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)


Rows = list[tuple[int, ...]]


def expected(case: Case, rows: Rows, masks: Sequence[int]) -> list[list[object]]:
    """For each result, the expectations of all lanes, the launches of `masks` put together."""
    answers: list[object] = [None] * len(rows)
    if case.group:
        for first in range(0, len(rows), WARP):
            for mask in masks:
                lanes = case.reference(mask, rows[first : first + WARP])
                for lane in range(WARP):
                    if mask >> lane & 1:
                        answers[first + lane] = lanes[lane]  # type: ignore[index]
    else:
        answers = [case.reference(*row) for row in rows]
    if len(case.results) == 1:
        return [answers]
    return [[answer[k] for answer in answers] for k in range(len(case.results))]  # type: ignore[index]


def differences(
    case: Case, rows: Rows, want: list[object], got: np.ndarray[Any, Any], where: str
) -> list[str]:
    exact = np.array([w if isinstance(w, int) else 0 for w in want], np.uint64)
    suspects = np.nonzero(exact != got)[0].tolist()
    suspects += [k for k, w in enumerate(want) if isinstance(w, Accept)]
    told = []
    for lane in sorted(set(suspects)):
        bits, w = int(got[lane]), want[lane]
        if isinstance(w, Accept) and w(bits):
            continue
        shown = f"{w:#x}" if isinstance(w, int) else str(w)
        operands = ", ".join(f"{v:#x}" for v in rows[lane])
        told.append(f"{case.instruction}({operands}): {bits:#x} instead of {shown} {where}")
    if len(told) > TOLD:
        told[TOLD:] = [f"{case.instruction}: and {len(told) - TOLD} more {where}"]
    return told


def compare(cases: Sequence[Case], driver: Path, folder: Path) -> Outcome:
    """Runs the cases at each instruction-set level; `folder` takes the files in between."""
    outcome = Outcome()
    parts = [
        list(cases[k : k + KERNELS_OF_A_MODULE]) for k in range(0, len(cases), KERNELS_OF_A_MODULE)
    ]
    jobs, all_rows = [], []
    for part in parts:
        rows = [operand_rows(c.operands, c.count, c.instruction + c.body) for c in part]
        all_rows.append(rows)
        flat = [np.array(r, np.uint64).T.reshape(-1) for r in rows]
        jobs.append(
            {
                "text": module(part),
                "kernels": [(len(c.operands), len(c.results), c.count) for c in part],
                "inputs": np.concatenate(flat),
            }
        )
    (folder / "job").write_bytes(pickle.dumps(jobs))
    (folder / "machine.toml").write_text(MACHINE)
    answers = {level: _execute(driver, folder, level) for level in LEVELS}
    for number, (part, rows) in enumerate(zip(parts, all_rows, strict=True)):
        for n, at, case in _places(part):
            if n in answers[LEVELS[0]][number]["refused"]:
                outcome.refused.add(case.instruction)
                continue
            for kind, masks in (("plain", (ALL_LANES,)), ("masked", MASKS)):
                if kind == "plain" or case.group:
                    want = expected(case, rows[n], masks)
                for level in LEVELS:
                    answer = answers[level][number]
                    for k, wanted in enumerate(want):
                        first = at + k * case.count
                        got = answer[kind][first : first + case.count]
                        where = f"[{kind}, {level or 'best level'}, result {k}]"
                        outcome.differences += differences(case, rows[n], wanted, got, where)
    return outcome


def _places(part: list[Case]) -> list[tuple[int, int, Case]]:
    places, at = [], 0
    for n, case in enumerate(part):
        places.append((n, at, case))
        at += len(case.results) * case.count
    return places


def _execute(driver: Path, folder: Path, level: str) -> list[dict[str, Any]]:
    environment = {
        **os.environ,
        "GPUPOOL_SIMGPU_MACHINE": str(folder / "machine.toml"),
        "GPUPOOL_SIMGPU_STATE_DIR": str(folder / "state"),
        "GPUPOOL_SIMGPU_ISA": level,
        "OPENBLAS_NUM_THREADS": "1",
    }
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    script = Path(__file__).with_name("execute.py")
    library, result = driver / "libcuda.so.1", folder / "result"
    done = subprocess.run(
        [sys.executable, str(script), str(library), str(folder / "job"), str(result)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        raise RuntimeError(f"the driver failed at level {level!r}:\n{done.stderr[-3000:]}")
    answer: list[dict[str, Any]] = pickle.loads(result.read_bytes())
    return answer
