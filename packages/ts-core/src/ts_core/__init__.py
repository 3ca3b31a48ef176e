"""Foundations that every TrainStream package shares.

Errors, option checks, byte budgets, block discovery, op registration and test helpers, plus the C++ headers
and CMake rules the kernel packages are built with. Importing this package is cheap and never touches a GPU.
"""

from importlib.metadata import version

__version__ = version("ts-core")
