"""Mutants of the verifiers that the audit alone must reject: `python tests/audit_mutations.py`.

Operators, constants, dropped updates and swapped arguments of `jaxspec/verify` and `proposals.py` are
changed one at a time, in a copy of the package, and every rule is audited there. No other test
runs. A mutant that changes a verdict must be rejected; `EQUIVALENT` lists the survivors, each with
the reason why no verdict changes. A run takes about an hour on two cores, so that this is not a part
of the suite.
"""

import argparse
import ast
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FILES = (
    "verify/kernel.py",
    "verify/reader.py",
    "verify/top_down.py",
    "verify/bottom_up.py",
    "verify/verdict.py",
    "verify/batching.py",
    "proposals.py",
)
COMPARE = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
BINARY = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.BitAnd: "|", ast.BitOr: "&",
}  # fmt: skip
CALLS = {"maximum": "minimum", "minimum": "maximum", "any": "all", "all": "any", "argmax": "argmin"}

EQUIVALENT = {
    "child >= 0 -> (child) > (0)": "no child is node 0, the root",
    "child_at(tree, walk.site.node, walk.rank) >= 0 -> "
    "(child_at(tree, walk.site.node, walk.rank)) > (0)": "no child is node 0, the root",
    "walk.depth < tree.max_depth -> (walk.depth) <= (tree.max_depth)": (
        "a node at the greatest depth has no children"
    ),
    "is_rejected & has_next -> ((is_rejected) | (has_next))": "sums are measured that nobody uses",
    "~reader.is_exact & ~jnp.isfinite(mass) -> ((~reader.is_exact) | (~jnp.isfinite(mass)))": (
        "the walk is repeated with exact masses though it need not be"
    ),
}
"""Survivors by what is changed, and why no verdict changes."""


class Mutant(NamedTuple):
    """A change of one piece of source."""

    file: str
    start: int
    stop: int
    new: str
    name: str


def mutants(file: str) -> Iterator[Mutant]:
    """List the mutants of a file."""
    source = (ROOT / "jaxspec" / file).read_text(encoding="utf-8")
    lines = list(itertools.accumulate([0, *map(len, source.splitlines(keepends=True))]))
    tree = ast.parse(source)
    skipped = {id(node) for node in _unmutated(tree)}

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            lines[node.lineno - 1] + node.col_offset,
            lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(node: ast.expr | ast.stmt) -> str:
        start, stop = span(node)
        return source[start:stop]

    def change(node: ast.expr | ast.stmt, new: str) -> Mutant:
        start, stop = span(node)
        short = " ".join(text(node).split())
        name = f"{file}:{node.lineno}: {short} -> {' '.join(new.split())}"
        return Mutant(file, start, stop, new, name)

    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in COMPARE:
                yield change(node, f"({text(left)}) {COMPARE[type(op)]} ({text(right)})")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                yield change(node, f"(({text(left)}) {BINARY[type(op)]} ({text(right)}))")
            case ast.UnaryOp(op=ast.Invert(), operand=operand):
                yield change(node, f"({text(operand)})")
            case ast.Constant(value=bool() as value):
                yield change(node, str(not value))
            case ast.Constant(value=int() | float() as value):
                yield change(node, "1" if value == 0 else "0" if value == 1 else f"{value + 1}")
            case ast.Call(func=ast.Attribute(attr=name, value=module)) if name in CALLS:
                arguments = ", ".join(map(text, node.args))
                keywords = "".join(f", {text_of(k, source, span)}" for k in node.keywords)
                yield change(node, f"{text(module)}.{CALLS[name]}({arguments}{keywords})")
            case ast.Call(func=func, args=[*before, first, second]) if _may_swap(first, second):
                given = ", ".join(map(text, [*before, second, first]))
                keywords = "".join(f", {text_of(k, source, span)}" for k in node.keywords)
                yield change(node, f"{text(func)}({given}{keywords})")
            case ast.AugAssign():
                yield change(node, "pass")
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "replace":
            for dropped in node.keywords:
                rest = [*map(text, node.args)]
                rest += [text_of(k, source, span) for k in node.keywords if k is not dropped]
                yield change(node, f"{text(node.func)}({', '.join(rest)})")


def text_of(keyword: ast.keyword, source: str, span) -> str:
    """Return the source of a keyword argument."""
    start, stop = span(keyword.value)
    return f"{keyword.arg}={source[start:stop]}" if keyword.arg else f"**{source[start:stop]}"


def _may_swap(first: ast.expr, second: ast.expr) -> bool:
    simple = ast.Name | ast.Attribute | ast.Call | ast.Subscript
    return isinstance(first, simple) and isinstance(second, simple)


def _unmutated(tree: ast.Module) -> Iterator[ast.AST]:
    """List docstrings, annotations, checks of arguments and decorators, with all inside them."""
    for node in ast.walk(tree):
        roots: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            roots += [*node.decorator_list, node.returns, *node.args.defaults, node.args]
            if node.name in ("validate", "check") or node.name.startswith("assert_"):
                roots.append(node)
        if isinstance(node, ast.ClassDef):
            roots += [n for n in node.body if not isinstance(n, ast.FunctionDef)]
            roots += node.decorator_list
        if isinstance(node, ast.AnnAssign):
            roots.append(node.annotation)
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            roots += [node] if node.value.id[:1].isupper() or node.value.id == "tuple" else []
        if isinstance(node, ast.Assert | ast.Raise | ast.JoinedStr | ast.ImportFrom):
            roots.append(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            roots += [node, node.value]
        for root in roots:
            yield from ast.walk(root) if root is not None else ()


AUDIT = """
import sys
import jaxspec as js
from jaxspec import audit
from jaxspec.audit.batches import batch_faults
from jaxspec.audit.reference import PLAIN_RULES

def check(failures):
    if failures:
        print(failures[0])
        sys.exit(7)

for rule in sorted(js.RULES.values(), key=lambda rule: rule.name in ("with_replacement", "block")):
    instances = audit.instances_for(rule)
    for instance in instances:
        check(audit.exact_law(rule, instance, padded_to=instances, points=2**12).failures)
    check(batch_faults(rule, PLAIN_RULES[rule.name]))
"""
"""What `audit_rules` does, one after the other, so that it ends at the first failure."""


def is_rejected(mutant: Mutant, copy: Path, timeout: float) -> str:
    """Return how the audit of a mutated copy ended: "rejected", "raised", "hung" or "SURVIVED"."""
    path = copy / "jaxspec" / mutant.file
    source = path.read_text(encoding="utf-8")
    path.write_text(source[: mutant.start] + mutant.new + source[mutant.stop :], encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"}
    environment.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    try:
        done = subprocess.run(
            [sys.executable, "-c", AUDIT],
            cwd=copy, env=environment, capture_output=True, check=False, timeout=timeout,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        path.write_text(source, encoding="utf-8")
    return {0: "SURVIVED", 7: "rejected"}.get(done.returncode, "raised")


def main() -> int:
    """Audit mutants, and report those that survive without a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="mutants, drawn with the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="audits at a time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one audit")
    parser.add_argument("--only", default="", help="only mutants whose name holds this text")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    args = parser.parse_args()
    every = [each for file in FILES for each in mutants(file) if args.only in each.name]
    chosen = random.Random(args.seed).sample(every, min(args.num, len(every)))
    if args.list:
        print("\n".join(each.name for each in chosen), f"\n{len(chosen)} of {len(every)}")
        return 0
    survivors = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{folder}/cache")
        copies = [Path(folder) / f"copy{job}" for job in range(args.jobs)]
        for copy in copies:
            shutil.copytree(ROOT / "jaxspec", copy / "jaxspec")

        def audit(mutant: Mutant) -> tuple[Mutant, str]:
            copy = copies.pop()
            try:
                return mutant, is_rejected(mutant, copy, args.timeout)
            finally:
                copies.append(copy)

        for mutant, result in pool.map(audit, chosen):
            is_known = result == "SURVIVED" and mutant.name.split(":", 2)[2].strip() in EQUIVALENT
            print(f"{'equivalent' if is_known else result:10} {mutant.name}", flush=True)
            survivors += [mutant.name] if result == "SURVIVED" and not is_known else []
    print(f"{len(chosen)} mutants, {len(survivors)} survive without a reason", *survivors, sep="\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
