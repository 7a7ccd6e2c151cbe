"""The depth of the evaluation stack follows from a code alone, in any code; a new instruction fails here."""

from __future__ import annotations

import sys
import types

import pytest

from functional_cg.stages.watch.evaluation import depths_of, readable

pytestmark = pytest.mark.skipif(not readable(), reason="another interpreter")


def test_depths_agree_in_any_code() -> None:
    """Each instruction is reached with one depth, which is never more than the compiler provided for."""
    found = 0
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or found > 150:
            continue
        with open(file, encoding="utf-8") as source:
            left = [compile(source.read(), file, "exec")]
        while left:
            code = left.pop()
            left += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            reached = list(depths_of(code).values())
            assert reached, code
            assert 0 <= min(reached), code
            assert max(reached) <= code.co_stacksize, code
            found += 1
    assert found > 100
