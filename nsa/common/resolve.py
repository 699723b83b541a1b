"""Choice of an implementation: the dispatcher's, or the op's meta function for tensors without values."""

from __future__ import annotations

import dispatch


def resolve(call: dispatch.Call, backend: str | None, *, meta: str) -> dispatch.Impl:
    """Return `dispatch.resolve` of the call, or the op's meta function for tensors on the meta device.

    Args:
        call: the op, device, dtype and options of the call.
        backend: name of a backend, or None for the first that supports the call. On the meta device only the name is
            checked, since shapes and dtypes are the same for every backend.
        meta: "module:function" of the op's meta function, with the arguments of a backend's function.

    Raises:
        ValueError: for an unknown backend.
        dispatch.BackendError: if no backend supports the call.
    """
    if call.device_type != "meta":
        return dispatch.resolve(call, backend)
    dispatch.explain(call, backend)  # raises for an unknown name
    return dispatch.Impl(call.op, "meta", target=meta, check="")  # not in the table, so its check is never read
