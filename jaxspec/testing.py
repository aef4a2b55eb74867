"""For the test suites of other projects."""

from collections.abc import Callable
from typing import Any

from jaxspec.audit.lossless import check_lossless

__all__ = ("assert_lossless",)


def assert_lossless(verify: Callable[..., Any], **how: Any) -> None:
    """Raise AssertionError unless a verifier is lossless, and accepts as `rule` if that is named.

    It must also emit valid tokens, give the same tokens for the same randomness, in any batch, and not
    modify its arguments.

    Args:
      verify: the verifier.
      **how: the arguments of `jaxspec.audit.check_lossless`, of which `kind` and `randomness` are
        required.

    Raises:
      AssertionError: it fails, with the page of the report as message.
      ValueError: as `check_lossless`.

    >>> def emits_nothing(draft_tokens, draft_rows, target_rows, generator):
    ...     return []
    >>> try:
    ...     assert_lossless(emits_nothing, kind="path", randomness="numpy", budget=700)
    ... except AssertionError as error:
    ...     print(str(error).split(',')[1].strip())
    OUTPUT INVALID: verifier of kind 'path'
    """
    report = check_lossless(verify, **how)
    if not report.passes:
        raise AssertionError(str(report))
