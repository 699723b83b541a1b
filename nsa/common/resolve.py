"""Which implementation runs a call: the dispatcher's choice, and the op's meta function for tensors without values."""

from __future__ import annotations

import dispatch


def resolve(call: dispatch.Call, backend: str | None, *, meta: str) -> dispatch.Impl:
    """`dispatch.resolve`; for tensors on the meta device, the op's meta function.

    Args:
        call: the op, device, dtype and options of the call.
        backend: as users name it; None: the first that can run. On the meta device it is only checked to be a known
            name, since shapes and dtypes are the same for every backend.
        meta: "module:function" of the op's meta function, which takes the arguments of a backend's function.

    Raises:
        ValueError: for an unknown backend.
        dispatch.BackendError: when no backend can run the call.
    """
    if call.device_type != "meta":
        return dispatch.resolve(call, backend)
    dispatch.explain(call, backend)  # raises for an unknown name
    return dispatch.Impl(call.op, "meta", target=meta, check="")  # in no table, so its check is never read
