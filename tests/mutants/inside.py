"""`python -m tests.mutants.inside TREE ARGUMENTS…`: pytest, which must have run on the code of that tree and no other."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

IMPORTED_ELSEWHERE = 99


def main() -> int:
    """Run pytest; an installed idemp that was imported instead of the tree's proves nothing."""
    tree, arguments = Path(sys.argv[1]), sys.argv[2:]
    code = int(pytest.main(arguments))
    # Only now: what is imported before pytest starts has no rewritten assertions.
    strangers = [
        name
        for name, module in sys.modules.items()
        if name.partition(".")[0] in {"idemp", "tests"}
        and (file := getattr(module, "__file__", None)) is not None
        and not Path(file).resolve().is_relative_to(tree)
    ]
    ran = code in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}
    if strangers or (ran and "idemp" not in sys.modules):
        print(f"not imported from {tree}: {strangers[:3] or 'idemp'}")
        return IMPORTED_ELSEWHERE
    return code


if __name__ == "__main__":
    sys.exit(main())
