"""PTX modules that carry out cases: one kernel for each, one lane for each row of operands."""

from __future__ import annotations

from collections.abc import Sequence

from .case import Case
from .operands import register_width

HEADER = ".version 8.0\n.target sm_86\n.address_size 64\n"
BLOCK = 128
SLOT = 8  # bytes of an operand or a result in memory
CELL = 32  # bytes of a lane's own memory


def kernel(name: str, case: Case) -> str:
    """kernel(inputs, outputs, cells, mask): lanes whose bit of the mask is clear do nothing."""
    text = case.text()
    names: dict[str, str] = {"cell": "%cell", "shared": "%shared", "mask": "%mask"}
    declare = [
        ".reg .b64 %in, %out, %cell, %offset;",
        ".reg .b32 %i, %n, %x, %t, %mask, %shared;",
        ".reg .pred %skip;",
    ]
    before, after = [], []
    stride = case.count * SLOT
    for k, operand in enumerate(case.operands):
        names[f"a{k}"] = f"%a{k}"
        width = register_width(operand)
        if operand == "pred":
            declare.append(f".reg .pred %a{k};")
            before += [f"ld.global.b32 %t, [%in+{k * stride}];", f"setp.ne.u32 %a{k}, %t, 0;"]
        else:
            declare.append(f".reg .b{width} %a{k};")
            before.append(f"ld.global.b{width} %a{k}, [%in+{k * stride}];")
    for k, result in enumerate(case.results):
        names[f"d{k}"] = f"%d{k}"
        width = register_width(result)
        if result == "pred":
            declare.append(f".reg .pred %d{k};")
            after += [f"selp.b32 %t, 1, 0, %d{k};", f"st.global.b32 [%out+{k * stride}], %t;"]
        else:
            declare.append(f".reg .b{width} %d{k};")
            after.append(f"st.global.b{width} [%out+{k * stride}], %d{k};")
    body = text
    for placeholder, register in names.items():
        body = body.replace("{" + placeholder + "}", register)
    if "{shared}" in text:
        declare.append(f".shared .align 16 .b8 block_cells[{BLOCK * CELL}];")
        before += [
            "mov.u32 %shared, block_cells;",
            f"mad.lo.u32 %shared, %x, {CELL}, %shared;",
        ]
    lines = [
        *declare,
        "ld.param.u64 %in, [inputs];",
        "ld.param.u64 %out, [outputs];",
        "ld.param.u64 %cell, [cells];",
        "ld.param.u32 %mask, [active];",
        "mov.u32 %i, %ctaid.x;",
        "mov.u32 %n, %ntid.x;",
        "mov.u32 %x, %tid.x;",
        "mad.lo.u32 %i, %i, %n, %x;",
        "mov.u32 %t, %laneid;",
        "shr.u32 %t, %mask, %t;",
        "and.b32 %t, %t, 1;",
        "setp.eq.u32 %skip, %t, 0;",
        "@%skip bra DONE;",
        f"mul.wide.u32 %offset, %i, {SLOT};",
        "add.u64 %in, %in, %offset;",
        "add.u64 %out, %out, %offset;",
        f"mul.wide.u32 %offset, %i, {CELL};",
        "add.u64 %cell, %cell, %offset;",
        *before,
        body,
        *after,
        "DONE: ret;",
    ]
    parameters = ".param .u64 inputs, .param .u64 outputs, .param .u64 cells, .param .u32 active"
    return f".visible .entry {name}({parameters}) {{\n" + "\n".join(lines) + "\n}\n"


def module(cases: Sequence[Case]) -> str:
    """The text of a module whose kernels are k0, k1 ..."""
    return HEADER + "".join(kernel(f"k{n}", case) for n, case in enumerate(cases))
