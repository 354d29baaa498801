"""Every instruction that the simulated GPU carries out, against a reference of its own.

Random and extreme operands, whole and partial warps, both instruction-set levels; the references
are in tests/ptx_reference.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.ptx_reference.case import Case
from tests.ptx_reference.compare import compare
from tests.ptx_reference.exceptions import NOT_EXECUTED, OPCODES

ENGINE = Path(__file__).resolve().parents[2] / "native" / "simgpu"
FAMILIES = (
    "integer",
    "bits",
    "video",
    "floating",
    "half",
    "approximate",
    "convert",
    "memory",
    "atomic",
    "warp",
    "sequences",
)


def cases_of(family: str) -> list[Case]:
    found: list[Case] = importlib.import_module(f"tests.ptx_reference.families.{family}").cases()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_the_references(family: str, simulated_driver: Path, tmp_path: Path) -> None:
    cases = cases_of(family)
    outcome = compare(cases, simulated_driver, tmp_path)
    assert not outcome.differences, "\n".join(outcome.differences[:60])
    assert outcome.refused == {c.instruction for c in cases} & set(NOT_EXECUTED)


def test_a_difference_is_noticed(simulated_driver: Path, tmp_path: Path) -> None:
    def sometimes_wrong(a: int, b: int) -> int:
        return (a + b) & 0xFFFFFFFF ^ (a == 0x7FFFFFFF)

    case = Case("add.u32", ("u32",), ("u32", "u32"), sometimes_wrong)
    differences = compare([case], simulated_driver, tmp_path).differences
    assert all(d.startswith("add.u32(0x7fffffff, ") or "more" in d for d in differences)
    for where in ("plain, best level", "plain, baseline", "masked, best level", "masked, baseline"):
        assert any(where in d for d in differences), where


def decoded_opcodes() -> set[str]:
    """The opcodes of the decoder's table, as PTX spells them."""
    table = (ENGINE / "ptx" / "opcodes.inc").read_text()
    spelling = dict(re.findall(r'GPUPOOL_PTX_OPCODE\((\w+), "(\w+)"\)', table))
    decoder = (ENGINE / "exec" / "decoder.cc").read_text()
    body = decoder[decoder.index("void Decoder::one()") :]
    body = body[: body.index("default:")]
    return {spelling[name] for name in re.findall(r"case Op::(k\w+):", body)}


def test_every_opcode_of_the_decoder_has_a_reference() -> None:
    decoded = decoded_opcodes()
    assert len(decoded) > 80
    covered = {case.opcode for family in FAMILIES for case in cases_of(family)}
    assert decoded - covered == set(OPCODES)
    assert not covered - decoded
