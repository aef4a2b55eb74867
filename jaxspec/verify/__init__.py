"""Verifiers: which drafted tokens the target keeps. Private: the names are those of `jaxspec`."""

from jaxspec.verify.bottom_up import verify_block, verify_traversal
from jaxspec.verify.checked import Verifier, checked, strict
from jaxspec.verify.rules import RULES, Rule
from jaxspec.verify.top_down import verify_path, verify_tree
from jaxspec.verify.verdict import Status, Verdict

__all__ = (
    "RULES",
    "Rule",
    "Status",
    "Verdict",
    "Verifier",
    "checked",
    "strict",
    "verify_block",
    "verify_path",
    "verify_traversal",
    "verify_tree",
)
