#!/usr/bin/env python3
"""Counts what a product on Vulkan does for a weight: `tools/spirv/count.py [ROWS]`, for tiles of so many rows of x (1).

Needs spirv-opt and spirv-dis (Debian: spirv-tools). Kernels are unrolled for 2 and for 4 outputs of a warp; what the second has more
is what two outputs take for a slice, so that neither x nor the loop itself is counted. An `and` and an `or` of its result are
one LOP3 on NVIDIA's GPUs, like an `xor`. Of fp8 the branch for codes that want mending is counted as if it were always taken.

Then a bound: by how many instructions an H200 starts (132 SMs of 128 lanes at 1.755 GHz; 64 for integers, 16 for conversions), the share
of its read bandwidth (4.37 TB/s) that the weights could be taken at. It is an estimate of what binds, not a measurement.
"""

import collections
import os
import re
import subprocess
import sys
import tempfile

# Columns of a lane in a slice of one row, and bits of a weight with its scale: kernels/vulkan/weights.glsl.
CODINGS = {
    "f32": (8, 32),
    "int8_row": (32, 8),
    "int4_row": (64, 4),
    "int4_grouped": (64, 4.5),
    "int3_g64": (64, 3.5),
    "int2_row": (64, 2),
    "fp8_e4m3_b128": (32, 8),
}
BEGIN = (
    "--freeze-spec-const --fold-spec-const-op-composite --eliminate-dead-const --merge-return --inline-entry-points-exhaustive "
    "--private-to-local --eliminate-local-single-block --eliminate-local-single-store --ssa-rewrite --ccp --simplify-instructions"
)
UNROLL = (
    "--loop-unroll --scalar-replacement=0 --eliminate-local-single-block --eliminate-local-single-store --ssa-rewrite --ccp "
    "--eliminate-dead-branches --merge-blocks --simplify-instructions --redundancy-elimination --eliminate-dead-code-aggressive"
)
CLASSES = {
    "fma": ["Fma"],
    "add": ["OpFAdd", "OpFSub", "OpFMul"],
    "logic": ["OpBitwiseOr", "OpBitwiseXor"],
    "shift": ["OpShiftRightLogical", "OpShiftLeftLogical", "OpShiftRightArithmetic", "OpBitFieldUExtract", "OpBitFieldSExtract"],
    "convert": ["OpConvertUToF", "OpConvertSToF"],
    "compare": ["OpSelect", "OpIAdd", "OpIEqual", "OpINotEqual", "OpFOrdLessThan"],
}


def counted(kernel, rows, outputs):
    """How often each instruction stands in a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        unrolled = os.path.join(folder, "unrolled.spv")
        values = f"0:{rows} 1:{outputs}"
        passes = BEGIN.split() + 4 * UNROLL.split()
        command = ["spirv-opt", "--target-env=vulkan1.1", "--set-spec-const-default-value", values, *passes, kernel, "-o", unrolled]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        text = subprocess.run(["spirv-dis", "--no-header", unrolled], check=True, capture_output=True, text=True).stdout
    counts = collections.Counter()
    for line in text.splitlines():
        words = re.sub(r"^\s*%\S+ = ", "", line).split()
        if words:
            counts[words[3] if words[0] == "OpExtInst" else words[0]] += 1
    return counts


def main():
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    kernels = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../kernels/vulkan/spv")
    print(f"{'':15}" + "".join(f"{name:>9}" for name in [*CLASSES, "all", "bound"]))
    for coding, (columns, bits) in CODINGS.items():
        kernel = os.path.join(kernels, f"matmul_{coding}_subgroup.spv")
        two, four = counted(kernel, rows, 2), counted(kernel, rows, 4)
        weights = 2 * min(columns, 64 // rows)
        of = {name: sum(four[op] - two[op] for op in ops) / weights for name, ops in CLASSES.items()}
        total = sum(of.values())
        integers = of["logic"] + of["shift"] + of["compare"]
        lanes = min(128 / total, 64 / integers if integers else 128, 16 / of["convert"] if of["convert"] else 128)
        bound = 132 * 1.755e9 * lanes * bits / 8 / 4.37e12
        print(f"{coding:15}" + "".join(f"{value:9.2f}" for value in [*of.values(), total]) + f"{min(bound, 1):9.0%}")


if __name__ == "__main__":
    main()
