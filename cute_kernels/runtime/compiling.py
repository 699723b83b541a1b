"""The lock around all compilation by CuTe DSL, whose compiler must not run in two threads at once.

Hold it to compile, load or record kernels (runtime/jit.py, runtime/disk_cache.py, fa4/); launches of known kernels do
not need it. A program that itself compiles with CuTe DSL in other threads should hold it too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

COMPILING = threading.RLock()

# os.fork waits for another thread's compilation: in the child it would never end, and keep the lock
os.register_at_fork(before=COMPILING.acquire, after_in_parent=COMPILING.release, after_in_child=COMPILING.release)


def once(build: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache` that runs the function once per arguments, whichever threads call it, holding COMPILING.

    Known results are found without the lock. A call that raises is not cached: the next one builds again.
    """
    built: Any = cache(build)

    @cache
    @wraps(build)
    def known(*arguments: P.args, **keywords: P.kwargs) -> R:
        with COMPILING:
            return cast("R", built(*arguments, **keywords))

    return cast("Callable[P, R]", known)
