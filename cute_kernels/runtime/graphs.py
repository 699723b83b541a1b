"""CUDA graphs of launches that recur at the same addresses: one launch instead of twenty.

A training loop's steps allocate alike, so from the third one on PyTorch reuses the addresses of the step before. For a
recorded call (runtime/replay.py), `launch` runs

    the first time at some addresses    its launches, one by one
    the second                          a graph, in which it captures them
    later                               that graph

A graph holds addresses and no tensors, and is launched only by callers that hold tensors at all of them, on their
stream. The only difference from separate launches is host time. Addresses and graphs are evicted least recently used
first: more than MOST of them in rotation never become graphs.

While a stream is being captured, CUDA refuses to synchronize the device in any thread. Therefore nothing is captured
while another thread of the program might synchronize: launches stay separate until that thread has ended. Launches that
cannot be captured are launched separately, with a warning.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from cute_kernels.runtime import streams
from cute_kernels.runtime.cuda_runtime import Graph, Launches

VARIABLE = "NSA_KERNELS_GRAPHS"
"""Environment variable: 0 launches kernels separately, best for profilers. Read when cute_kernels is imported."""

DEVICES = set() if os.environ.get(VARIABLE) == "0" else {"cuda"}
"""Device types that use graphs."""

MOST = 512
"""LRU capacity, in calls at some addresses."""

FEWEST = 3
"""Minimum number of launches that are worth a graph."""

_LOCK = threading.Lock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_KNOWN: OrderedDict[Hashable, Graph | bool] = OrderedDict()
"""By key: a graph; True if launched once; False if it could not be captured."""

_LOG = logging.getLogger("nsa_kernels")
_TOLD = threading.Event()
"""Set once the presence of other threads has been reported."""


def launch(key: Hashable, device: torch.device, launches: Callable[[], Launches]) -> None:
    """Launch on the device's current stream.

    Args:
        key: identifies the launches and all addresses in their arguments.

    Warns:
        RuntimeWarning: the launches could not be captured, but were launched.
    """
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            launch(key, device, launches)
        return
    known: Graph | bool | None = None
    failure = None
    if not torch.cuda.is_current_stream_capturing():  # a caller's graph captures them separately
        with _LOCK:
            known = _KNOWN.pop(key, None)
            _KNOWN[key] = True if known is None else known
            if len(_KNOWN) > MOST:
                _KNOWN.popitem(last=False)
        if known is True and not _has_other_threads():
            try:
                known = Graph(device, launches())
            except Exception as error:
                streams.close_all()
                known, failure = False, error
            with _LOCK:
                _KNOWN[key] = known
    if isinstance(known, Graph):
        known.launch()
        return
    for function, arguments in launches():
        function(*arguments)
    if failure is not None:
        message = f"launches are not replayed as a CUDA graph, since they could not be captured: {failure}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _has_other_threads() -> bool:
    """True if the program has threads besides the main one, which waits while autograd's calls. Reported once.

    Daemon threads, started by data loaders and progress bars, count only if they make this call.
    """
    others = [
        thread.name
        for thread in threading.enumerate()
        if (not thread.daemon or thread.ident == threading.get_ident())
        and thread is not threading.main_thread()
        and not isinstance(thread, threading._DummyThread)  # not started by Python: autograd's
    ]
    if others and not _TOLD.is_set():
        _TOLD.set()
        _LOG.info("calls are not captured as CUDA graphs while there are other threads, as %s", others[0])
    return bool(others)


def forget() -> None:
    """Drop all graphs, for tests."""
    with _LOCK:
        _KNOWN.clear()
