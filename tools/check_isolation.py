"""Check that of our packages exactly the named ones can be imported, and from this environment alone.

Usage: python tools/check_isolation.py ts-core ts-quant
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from wheels import PACKAGES


def problems(wanted: list[str]) -> list[str]:
    """What is wrong with this environment, as sentences."""
    found = []
    for package in PACKAGES:
        name = package.replace("-", "_")
        spec = importlib.util.find_spec(name)
        if package not in wanted:
            if spec is not None:
                found.append(f"{name} is importable from {spec.origin}, but is no dependency of {wanted[0]}")
        elif spec is None or spec.origin is None:
            found.append(f"{name} is not installed")
        elif Path(sys.prefix) not in Path(spec.origin).parents:
            found.append(f"{name} comes from {spec.origin}, not from this environment")
    return found


if __name__ == "__main__":
    found = problems(sys.argv[1:])
    print("\n".join(found) or f"isolated: only {', '.join(sys.argv[1:])} of ours")
    sys.exit(bool(found))
