"""The collectives of context parallelism: agreement on a call, gathers, and sums of shares in a fixed order.

Ranks are those of the group, 0 ... R - 1. Tensors have their rows (tokens or entries) in the first dim; ranges of rows
that a rank holds or wants are those of nsa/distributed/layout.py. Before anything is sent, in forward or backward,
ranks agree on the call, so that none waits for a rank that raised or runs something else.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from nsa.common.derivatives import forbid_double_backward
from nsa.distributed.layout import Range, merged, moves

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Named all_gather_single from torch 2.13 on."""

REPORT_SECONDS = 1.0
"""Seconds that a rank whose collective failed waits for reports of other ranks, to name those that sent none."""


class Checks:
    """Compares calls among the ranks of a process group and counts the comparisons.

    It has its own connections, so that a comparison is never matched with another collective of a rank that runs
    something else: gloo aborts the process if sizes differ. All ContextParallels of a group share one, which counts
    their calls together and is destroyed with the group.

    Args:
        group: the ranks that compare calls.
        timeout: timeout of a comparison.
    """

    of_groups: ClassVar[weakref.WeakKeyDictionary[dist.ProcessGroup, Checks]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self.timeout, self.count = timeout, 0
        self.store = c10d.PrefixStore(f"nsa/checks/{group.group_name}", c10d._get_default_store())
        self.gloo: Any = dist.ProcessGroupGloo(self.store, group.rank(), group.size(), timeout=timeout)

    @classmethod
    def of(cls, group: dist.ProcessGroup, timeout: timedelta | None) -> Checks:
        """Return the group's Checks, created by the first call on all its ranks.

        Args:
            timeout: None means the group's.

        Raises:
            RuntimeError: if another rank does not create them in time.
            ValueError: for a timeout other than the first call's.
        """
        timeout = _group_timeout(group) if timeout is None else timeout
        found = cls.of_groups.get(group)
        if found is None:
            try:
                found = cls.of_groups[group] = cls(group, timeout)
            except RuntimeError as error:
                raise RuntimeError(
                    f"context parallelism: all ranks of the group must create a ContextParallel, and within {timeout} "
                    f"one did not: {error}"
                ) from error
        if found.timeout != timeout:
            raise ValueError(
                f"timeout must be {found.timeout}, as for the group's first ContextParallel, got {timeout}"
            )
        return found

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather the numbers of each rank; all ranks send equally many."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        every = [torch.empty_like(mine) for _ in range(self.gloo.size())]
        self.gloo.allgather([every], [mine]).wait()
        return [x.tolist() for x in every]

    def gather_facts(self, facts: Mapping[str, str]) -> list[dict[str, str]]:
        """Gather the facts of each rank."""
        text = json.dumps(dict(facts)).encode()
        longest = max(length for (length,) in self.gather([len(text)]))
        return [json.loads(bytes(found)) for found in self.gather(list(text.ljust(longest)))]


class Comm:
    """Communication over a process group.

    The group is referenced weakly, so that `destroy_process_group` ends its threads even if this object is still alive,
    as in a model with a reference cycle. gloo's threads would otherwise run until the interpreter exits, and may then
    abort the process.

    Args:
        group: the process group for tensors.
        timeout: timeout of comparisons of calls. Default: None, which means the group's.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta | None = None) -> None:
        Checks.of(group, timeout)
        self._group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._nccl = "nccl" in dist.get_backend_config(group)
        self.call = ""
        """Name of the last call that ranks have compared; its backwards use this name."""
        self.checked: set[Any] = set()
        """Calls that a backend is known to support (nsa/distributed/attention.py)."""

    @property
    def group(self) -> dist.ProcessGroup:
        """Raises RuntimeError if it has been destroyed."""
        found = self._group()
        if found is None:
            raise RuntimeError("the process group of this ContextParallel has been destroyed: create a new one")
        return found

    @property
    def checks(self) -> Checks:
        """Raises RuntimeError if the group has been destroyed."""
        return Checks.of_groups[self.group]

    # Agreement

    def agree(self, op: str, facts: Callable[[], tuple[Mapping[str, object], int]]) -> list[int]:
        """Raise on every rank unless the facts of a call are the same on all.

        Args:
            op: name of the op, for messages.
            facts: returns this rank's facts by argument name, and its number of rows; if it raises, all ranks raise.

        Returns:
            The number of rows of each rank.
        """
        self.call = f"{op}, call {self.checks.count + 1}"
        refusal: Exception | None = None
        known: dict[str, str] = {}
        rows = 0
        try:
            own, rows = facts()
            known |= {name: str(value) for name, value in own.items()}
        except Exception as error:  # any error is sent to the others, which would wait otherwise
            refusal = error
            known["refusal"] = f"{type(error).__name__}: {op} on rank {self.rank}: {error}"
        lengths, differing = self._compare(self.call, known, rows)
        if refusal is not None:
            raise refusal
        if differing:
            raise _disagreement(op, differing)
        return lengths

    def agree_on_backward(self, call: str) -> None:
        """Raise RuntimeError on every rank unless all are about to run the backward of the same call.

        Saved tensors are read before this: with activation checkpointing that runs a forward, which agrees, too.
        """
        _, differing = self._compare(f"backward of {call}", {}, 0)
        if differing:
            raise _disagreement(call, differing)

    def _compare(self, call: str, known: Mapping[str, str], rows: int) -> tuple[list[int], list[dict[str, str]]]:
        """Return the number of rows of each rank, and the facts of each if they differ.

        Args:
            call: the call that this rank is about to run, itself a fact.
            known: this rank's facts by name.
        """
        checks = self.checks
        checks.count += 1
        own = {"call": call, **known}
        digest = hashlib.blake2b(repr(sorted(own.items())).encode(), digest_size=8).digest()
        with self.named(f"agreement on {call}"):
            every = checks.gather([int.from_bytes(digest, "little", signed=True), rows])
            equal = len({found for found, _ in every}) == 1
            return [length for _, length in every], [] if equal else checks.gather_facts(own)

    # Gathers

    def start_gather(self, rows: Tensor, held: Sequence[list[Range]]) -> Callable[[], list[Tensor]]:
        """Start sending this rank's rows to all; the returned function waits for the rows of all, in order and in
        pieces.

        It overlaps with computation if the backend supports asynchronous operations on such tensors.

        Args:
            rows: `[n, ...]`, contiguous.
            held: the ranges of each rank.
        """
        lengths = [sum(b - a for a, b in own) for own in held]
        most = max(lengths)
        if self.size == 1 or most == 0:
            return lambda: [rows]
        message = rows if rows.shape[0] == most else rows.new_empty((most, *rows.shape[1:]))
        if message is not rows:
            message[: rows.shape[0]] = rows
            message[rows.shape[0] :] = 0
        buffer = rows.new_empty((self.size * most, *rows.shape[1:]))
        asynchronous = self._nccl or not rows.is_cuda
        group = self.group
        with self.named("gather"):
            work = all_gather(buffer, message, group=group, async_op=asynchronous)

        def finish() -> list[Tensor]:
            if work is not None:
                with self.named("gather"):
                    work.wait()
            return [buffer[a:b] for a, b in received_rows(held, most)]

        return finish

    def fetch(self, rows: Tensor, held: Sequence[list[Range]], wanted: Sequence[list[Range]]) -> Tensor:
        """Fetch the rows that this rank needs from the ranks that hold them; differentiable.

        If several ranks need a row, its gradients are summed in fp32 (fp64 for fp64) in rank order and rounded once.

        Args:
            rows: `[n, ...]`, those of `held[rank]`.
            held, wanted: ranges that each rank holds, and needs.
        """
        result: Tensor = _Fetch.apply(self, rows, held, wanted)
        return result

    def _fetch(self, rows: Tensor, held: Sequence[list[Range]], wanted: Sequence[list[Range]]) -> Tensor:
        sent = [[rows[slice(*m.held)] for m in moves(held[self.rank], there)] for there in wanted]
        places = [[m.wanted for m in moves(there, wanted[self.rank])] for there in held]
        result = rows.new_zeros((sum(b - a for a, b in wanted[self.rank]), *rows.shape[1:]))
        for (a, b), part in self._exchange(sent, places, rows):
            result[a:b] = part
        return result

    def add_shares(self, shares: Tensor, held: Sequence[list[Range]], wanted: Sequence[list[Range]]) -> Tensor:
        """Sum the shares of all ranks for this rank's rows, in rank order.

        Args:
            shares: shares for the rows of `wanted[rank]`, in fp32 or fp64.

        Returns:
            The sums for the rows of `held[rank]`.
        """
        sent = [[shares[slice(*m.wanted)] for m in moves(there, wanted[self.rank])] for there in held]
        places = [[m.held for m in moves(held[self.rank], there)] for there in wanted]
        total = shares.new_zeros((sum(b - a for a, b in held[self.rank]), *shares.shape[1:]))
        for (a, b), part in self._exchange(sent, places, shares):
            total[a:b] += part
        return total

    def _exchange(
        self, sent: list[list[Tensor]], places: list[list[Range]], like: Tensor
    ) -> Iterator[tuple[Range, Tensor]]:
        """Send rows to each rank; yield the received rows in rank order, each with its range."""
        empty = like[:0]
        counts = [sum(part.shape[0] for part in parts) for parts in sent]
        came = [sum(b - a for a, b in spots) for spots in places]
        message = torch.cat([empty, *(part for parts in sent for part in parts)])
        if self.size == 1:
            received = message
        else:
            received = like.new_empty((sum(came), *like.shape[1:]))
            group = self.group
            with self.named("exchange"):
                dist.all_to_all_single(received, message, came, counts, group=group)
        at = 0
        for spots in places:
            for a, b in spots:
                yield (a, b), received[at : at + b - a]
                at += b - a

    def sum(self, x: Tensor) -> Tensor:
        """Sum x over all ranks, in rank order and in x's dtype; not differentiable."""
        every, group = x.new_empty((self.size, *x.shape)), self.group
        with self.named("sum"):
            all_gather(every.view(-1), x.detach().reshape(-1), group=group)
        return every.sum(0, dtype=x.dtype)

    # Errors

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Context that adds to errors of a collective its name, the rank, and the ranks that reported no failure."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"context parallelism: {what} failed on rank {self.rank} of {self.size}, as it does if a rank has "
                f"exited or is late{self._silent_ranks()}: {error}"
            ) from error

    def _silent_ranks(self) -> str:
        """Text naming the ranks that have reported no failure in the store shared by all ranks."""
        try:
            store = self.checks.store
            keys = [f"failed/{self.checks.count}/{rank}" for rank in range(self.size)]
            store.set(keys[self.rank], "failed")
            try:
                store.wait(keys, timedelta(seconds=REPORT_SECONDS))
            except RuntimeError:
                silent = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
                return f" (no failure reported by rank {', '.join(silent)})" if silent else ""
        except (RuntimeError, ValueError) as error:  # the rank that holds the store may have exited
            return f" (the store of the process group does not answer: {type(error).__name__})"
        return ""


def received_rows(held: Sequence[list[Range]], most: int) -> list[Range]:
    """Ranges of a gather's receive buffer that hold the rows of all ranks in order; adjacent ranges are merged.

    Args:
        held: ranges of each rank, consecutive in its message.
        most: number of rows of a message.
    """
    places = []
    for rank, own in enumerate(held):
        at = rank * most
        for start, stop in own:
            places.append((start, (at, at + stop - start)))
            at += stop - start
    return merged([place for _, place in sorted(places)])


def _group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a group's collectives; PyTorch's default if the backend does not report one."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout: timedelta = getattr(options, "_timeout", c10d.default_pg_timeout)
    return timeout


def _disagreement(op: str, differing: Sequence[Mapping[str, str]]) -> Exception:
    """The error to raise on every rank, from the facts of all."""
    for facts in differing:
        if "refusal" in facts:
            kind, _, message = facts["refusal"].partition(": ")
            return (TypeError if kind == "TypeError" else ValueError)(message)
    names = dict.fromkeys(name for facts in differing for name in facts)
    for name in names:
        values = [facts.get(name, "nothing") for facts in differing]
        usual = max(values, key=values.count)
        for rank, value in enumerate(values):
            if value != usual:
                other = values.index(usual)
                got = f"{value} on rank {rank} and {usual} on rank {other}"
                if name == "call":
                    return RuntimeError(
                        f"context parallelism: ranks must run the same calls and backwards in the same order, got {got}"
                    )
                return ValueError(f"{op}: {name} must be the same on all ranks, got {got}")
    raise AssertionError("the facts of all ranks are equal")


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, comm: Comm, rows: Tensor, held: Sequence[list[Range]], wanted: Sequence[list[Range]]
    ) -> Tensor:
        ctx.comm, ctx.call, ctx.held, ctx.wanted = comm, comm.call, held, wanted
        return comm._fetch(rows, held, wanted)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.comm.agree_on_backward(ctx.call)
        wide = torch.promote_types(grad.dtype, torch.float32)
        with torch.no_grad():
            total = ctx.comm.add_shares(grad.to(wide), ctx.held, ctx.wanted).to(grad.dtype)
        return None, forbid_double_backward("fetch", [total], grad)[0], None, None
