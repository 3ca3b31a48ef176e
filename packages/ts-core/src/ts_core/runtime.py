"""What native modules share at run time.

The first native module of the project to be imported makes the CPU thread pool and leaves its capsule here;
the others take it, so that a process has one pool however many modules it loads (``ts/thread_pool.h``).
"""

from typing import Any

#: PyCapsule ``ts_core.thread_pool.v1``, or None until a native module is imported.
thread_pool_capsule: Any = None
