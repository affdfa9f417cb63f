"""Checks of compiled programs: the one with all logits computes all of them, the one with one logit does not.

A benchmark is worth nothing if the compiler removed the work, or if the fast path quietly does the slow one's. Both are
checked on the text of the very programs that are timed.
"""

import math
import re
from collections.abc import Iterator

from pols_jax.errors import ProgramError

# The result of an instruction, and its operation: "%dot.1 = f32[1024,32]{1,0} dot(%a, %b), ...".
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (?P<result>\(.*?\)|\S+) (?P<operation>[\w-]+)\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
# What a matrix product may be compiled to; vendors' libraries are custom calls.
_PRODUCTS = ("dot", "convolution", "custom-call")
# These name arrays that are there already.
_NAMES = ("parameter", "tuple", "get-tuple-element", "bitcast")


def wide_products(program: str, num_classes: int) -> int:
    """Counts the products in a compiled program whose result is as wide as there are classes."""
    return sum(
        operation in _PRODUCTS and any(num_classes in shape for shape in shapes)
        for operation, shapes in _instructions(program)
    )


def kernel_sized_arrays(program: str, num_classes: int, num_features: int) -> int:
    """Counts the arrays that a compiled program writes, its parameters left out, that are as large as the kernel.

    What stands inside a fusion is left out: of a gather from a converted kernel, for one, only the asked row is computed.
    """
    return sum(
        operation not in _NAMES
        and any(num_classes in shape and math.prod(shape) >= num_classes * num_features for shape in shapes)
        for operation, shapes in _instructions(_without_fusions(program))
    )


def check_programs(
    *, all_logits: str, one_logit: str, backbone: str, num_classes: int, num_features: int
) -> None:
    """Raises a `ProgramError` unless the program of all logits has a product over all classes, and that of one none.

    The program of one logit must not write anything as large as the kernel either. A layer of the backbone may happen to
    be k wide, so both are compared with the text of the program of the backbone alone; it is empty for programs of the
    head alone. With a single class the two do the same work, and nothing is checked.
    """
    if num_classes == 1:
        return
    of_backbone = wide_products(backbone, num_classes)
    if wide_products(all_logits, num_classes) <= of_backbone:
        raise ProgramError(f"The compiled program of all logits has no product over {num_classes:,} classes.")
    if wide_products(one_logit, num_classes) > of_backbone:
        raise ProgramError(f"The compiled program of one logit has a product over {num_classes:,} classes.")
    size = num_classes, num_features
    if kernel_sized_arrays(one_logit, *size) > kernel_sized_arrays(backbone, *size):
        raise ProgramError(f"The compiled program of one logit writes a kernel of {num_classes:,} classes.")


def _without_fusions(program: str) -> str:
    """The program without the computations that fusions are made of."""
    fused = set(re.findall(r" fusion\(.*calls=%?([\w.-]+)", program))
    kept, inside = [], False
    for line in program.splitlines():
        if header := re.match(r"%?([\w.-]+) \(.*\{$", line):
            inside = header[1] in fused
        elif line.startswith("ENTRY"):
            inside = False
        if not inside:
            kept.append(line)
    return "\n".join(kept)


def _instructions(program: str) -> Iterator[tuple[str, list[list[int]]]]:
    """The operation and the shapes of the result of every instruction."""
    for line in program.splitlines():
        if found := _INSTRUCTION.match(line):
            sizes = _SHAPE.findall(found["result"])
            yield found["operation"], [[int(n) for n in size.split(",") if n] for size in sizes]
