"""flash-linear-attention's own Triton kernels on a CPU, in Triton's interpreter; test_triton.py runs this.

Prints one JSON object a check, see fused_cases.py. fp32 only: the interpreter's bf16 is garbage. Triton 3.9 lacks two
things for these kernels, which are taught here; they can go when `python tests/triton_interpreter.py` runs without.
"""

import ast
import json
import os
import sys
import time

os.environ["TRITON_INTERPRET"] = "1"  # read where kernels are defined

import fused_cases
import torch
from triton.runtime import autotuner, interpreter


def teach_the_interpreter() -> None:
    """Autotuning without a driver to time with, and loop variables that are tensors, as assigned variables are."""
    autotuner.Autotuner._bench = lambda self, *args, config, **meta: 0.0

    def visit_for(self, node: ast.For) -> ast.AST:
        if isinstance(node.iter, ast.Call) and getattr(node.iter.func, "id", None) == "range":
            assignment = ast.Assign([node.target], ast.Name(node.target.id, ast.Load()))  # visit_Assign wraps it
            node.body.insert(0, ast.copy_location(assignment, node))
        return self.generic_visit(node)

    interpreter.ASTTransformer.visit_For = visit_for


CHECKS = {
    "gated delta rule": lambda: fused_cases.delta_rule("qwen3_5", fused_cases.DOCUMENTS),
    "gated delta rule, many of one token": lambda: fused_cases.delta_rule("qwen3_5", (1,) * 9 + (66, 1)),
    "kimi delta attention": lambda: fused_cases.delta_rule("kimi_linear", fused_cases.DOCUMENTS),
    "convolution": lambda: fused_cases.convolution(fused_cases.DOCUMENTS, bias=False, activation="silu"),
    "convolution with a bias": lambda: fused_cases.convolution((3, 3, 1, 2, 65), bias=True, activation=None),
    "qwen3_5": lambda: fused_cases.whole_model("qwen3_5"),
    "qwen3_5 probe": lambda: fused_cases.probe("qwen3_5"),
    "qwen3_5 without boundaries": lambda: fused_cases.forgetful_model("qwen3_5"),
    "kimi_linear": lambda: fused_cases.whole_model("kimi_linear"),
}


if __name__ == "__main__":
    teach_the_interpreter()
    torch.set_num_threads(1)
    for name in sys.argv[1:] or CHECKS:
        began = time.perf_counter()
        print(
            json.dumps({"check": name, **CHECKS[name](), "seconds": round(time.perf_counter() - began, 1)}), flush=True
        )
