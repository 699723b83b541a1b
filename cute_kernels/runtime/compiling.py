"""The lock around everything that CuTe DSL compiles: its compiler must not run in two threads at once.

Whatever compiles, loads or records kernels holds it (runtime/jit.py, runtime/disk_cache.py, fa4/); launches of known
kernels do not. A program that compiles with CuTe DSL itself, in other threads, should hold it too.
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

# os.fork waits for another thread's compilation: in the child it would never end, and hold the lock
os.register_at_fork(before=COMPILING.acquire, after_in_parent=COMPILING.release, after_in_child=COMPILING.release)


def once(build: Callable[P, R]) -> Callable[P, R]:
    """`functools.cache` whose function runs once for its arguments, whichever threads call it, and holds COMPILING.

    Known results are found without the lock. A call that raises is not remembered: the next one builds again.
    """
    built: Any = cache(build)

    @cache
    @wraps(build)
    def known(*arguments: P.args, **keywords: P.kwargs) -> R:
        with COMPILING:
            return cast("R", built(*arguments, **keywords))

    return cast("Callable[P, R]", known)
