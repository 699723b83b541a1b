"""Launches that come again at the same addresses, as CUDA graphs: one launch in place of twenty.

A program's steps allocate alike, so from the third one on PyTorch gives them the addresses of the step before. Of a
recorded call (runtime/replay.py), `launch` takes

    the first time at some addresses    its launches, one by one
    the second                          a graph, in which it captures them
    later ones                          that graph

A graph holds addresses and no tensors, and is launched only by callers that have tensors at all of them, on their
stream. So nothing differs from the launches one by one but the host's time. What was not launched for longest is
forgotten, addresses and graphs alike: more of them than MOST in turn never become graphs.

While a stream is captured, CUDA refuses to synchronize the device, to any thread. So nothing is captured where another
thread of the program might: launches stay what they are until it has ended. Launches that cannot be captured are
launched one by one, with a warning.
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
"""Environment variable: 0 launches one by one, as profilers show best. Read when cute_kernels is imported."""

DEVICES = set() if os.environ.get(VARIABLE) == "0" else {"cuda"}
"""Types of devices that graphs are for."""

MOST = 512
"""Calls at some addresses that are remembered."""

FEWEST = 3
"""Launches that are worth a graph."""

_LOCK = threading.Lock()
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)
_KNOWN: OrderedDict[Hashable, Graph | bool] = OrderedDict()
"""By key: a graph; True, launched once; or False, could not be captured."""

_LOG = logging.getLogger("nsa_kernels")
_TOLD = threading.Event()
"""That there are other threads."""


def launch(key: Hashable, device: torch.device, launches: Callable[[], Launches]) -> None:
    """Launch on the device's current stream.

    Args:
        key: of the launches and all addresses in their arguments.

    Warns:
        RuntimeWarning: the launches could not be captured, but were launched.
    """
    if device.type == "cuda" and torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            launch(key, device, launches)
        return
    known: Graph | bool | None = None
    failure = None
    if not torch.cuda.is_current_stream_capturing():  # a caller's graph gets them one by one
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
    """Whether the program has threads beside the main one, which waits while autograd's calls. Says so once.

    Daemons, which data loaders and progress bars start, count only where they call themselves.
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
    """All graphs, for tests."""
    with _LOCK:
        _KNOWN.clear()
