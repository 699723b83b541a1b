"""generate() of converted models, with caches and without, and their caches' methods."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CompileConfig, DynamicCache, StaticCache

from nsa import NSAConfig
from nsa.integrations.transformers.cache import CacheLayer
from nsa.integrations.transformers.modeling import CACHE_ARGUMENT
from tests.support import cases
from tests.support.hf_models import converted_model, token_ids
from tests.support.threads import MESSAGE, while_running

pytestmark = pytest.mark.hf_extra

NEW = 10


def generate(model: Any, ids: Tensor | None, **kwargs: Any) -> Tensor:
    """NEW tokens, the likeliest ones unless told otherwise."""
    torch.manual_seed(1)
    result: Tensor = model.generate(ids, **{"max_new_tokens": NEW, "do_sample": False} | kwargs)
    return result


def left_padded(*lengths: int) -> tuple[Tensor, Tensor]:
    width = max(lengths)
    ids = token_ids(len(lengths), width)
    mask = torch.stack([torch.arange(width) >= width - n for n in lengths]).long()
    return ids.masked_fill(mask == 0, 0), mask


def call_with(model: Any, ids: Tensor, cache: Any, **kwargs: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **{CACHE_ARGUMENT: cache}, **kwargs).logits


WAYS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "greedy": ("qwen3", {}, {}),
    "static, prompt in chunks": ("llama", {"cache_implementation": "static", "prefill_chunk_size": 16}, {}),
    "sampling": ("llama", {}, {"do_sample": True, "num_return_sequences": 2}),
    "beams": ("llama", {}, {"num_beams": 3}),
}
"""What model, keywords with a cache, keywords with and without one."""


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_with_and_without_a_cache(way: str) -> None:
    kind, cached, both = WAYS[way]
    model = converted_model(kind)
    ids, mask = left_padded(40, 33)
    written = generate(model, ids, attention_mask=mask, **cached, **both)
    assert torch.equal(written, generate(model, ids, attention_mask=mask, use_cache=False, **both))
    if way == "greedy":  # a row is its text alone
        assert torch.equal(written[1, 7:], generate(model, ids[1:, 7:])[0])


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_chunks_of_padding_alone_begin_a_prompt(how: dict[str, Any]) -> None:
    """Texts begin in different chunks, at their first token or inside; a row is its text alone."""
    model = converted_model(num_hidden_layers=1)
    ids, mask = left_padded(40, 27, 3)
    written = generate(model, ids, attention_mask=mask, **how)
    for size in (8, 13, 14):
        assert torch.equal(generate(model, ids, attention_mask=mask, prefill_chunk_size=size, **how), written), size
    for row, begin in ((1, 13), (2, 37)):
        assert torch.equal(written[row, begin:], generate(model, ids[row : row + 1, begin:], **how)[0])
    mask[0, 6:] = 0  # it ends inside the first chunk, in which the others have not begun
    with pytest.raises(ValueError, match="padded the cached texts to the right"):
        generate(model, ids, attention_mask=mask, prefill_chunk_size=8, **how)


@pytest.mark.parametrize("steps", [200, pytest.param(4096, marks=pytest.mark.full)])
def test_long_texts_are_those_without_a_cache(steps: int) -> None:
    """Row i of a call on the whole text is what generate sees at step i without a cache; near ties may fall otherwise.

    The cache grows on the way, and windows, blocks and entries come and go.
    """
    model, ids = converted_model(num_hidden_layers=1), token_ids(1, 50)
    written = generate(model, ids, max_new_tokens=steps)
    with torch.no_grad():
        logits = model(written, use_cache=False).logits[0, 49:-1]
    chosen = logits.gather(1, written[0, 50:, None])[:, 0]
    assert (logits.amax(1) - chosen).max() < 1e-4
    assert len(written[0, 50:].unique()) > 20, "steps that differ"


def test_a_second_turn_goes_on_from_the_first_ones_cache() -> None:
    model, ids, cache = converted_model(), token_ids(2, 40), DynamicCache()
    first = generate(model, ids, **{CACHE_ARGUMENT: cache})
    both = torch.cat([first, ids[:, :7]], 1)
    assert torch.equal(generate(model, both, **{CACHE_ARGUMENT: cache}), generate(model, both))


def test_assisted_decoding() -> None:
    model, assistant = converted_model(), converted_model(num_hidden_layers=1)
    assistant.load_state_dict(model.state_dict(), strict=False)  # it guesses right at times
    ids = token_ids(1, 40)
    assert torch.equal(generate(model, ids, assistant_model=assistant), generate(model, ids))
    tile = converted_model(
        options=NSAConfig(compress_block_size=8, window_size=8, num_selected_blocks=2, q_tile_size=16)
    )
    with pytest.raises(ValueError, match=r"requires a cache that can be cropped|queries since then are kept"):
        generate(tile, ids, prompt_lookup_num_tokens=3)


def test_tile_mode_generates_from_prefixes() -> None:
    """With a cache each token is the row of the call on its prefix, as without; only the prompt's rows differ."""
    options = NSAConfig(compress_block_size=8, window_size=8, num_selected_blocks=2, q_tile_size=16)
    model = converted_model(options=options, num_hidden_layers=1)
    ids = token_ids(2, 40)
    expected = generate(model, ids)
    assert torch.equal(expected, generate(model, ids, use_cache=False))
    cache = DynamicCache()
    call_with(model, ids, cache)
    cache.batch_select_indices(torch.tensor([1, 0, 1]))  # with sums of the open tile's queries
    following = call_with(model, expected[[1, 0, 1], 40:41], cache)
    assert torch.equal(following[:, -1].argmax(-1), expected[[1, 0, 1], 41])


# Compiled steps


@pytest.fixture
def anew() -> None:
    """Nothing is compiled yet."""
    torch.compiler.reset()


def compiles(test: Callable[..., None]) -> Callable[..., None]:
    """Marks of a test that compiles."""
    quiet: Any = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inside torch.compile
    return pytest.mark.usefixtures("anew")(quiet(test))  # type: ignore[no-any-return]


class Graphs:
    """A backend of torch.compile that counts the graphs it gets; deep copies, as a CompileConfig makes, count here."""

    count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor], **_: Any) -> Any:
        self.count += 1
        return graph

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        return self

    def config(self) -> CompileConfig:
        """Whole graphs, on a CPU, too."""
        made = CompileConfig(fullgraph=True, backend=self, mode="default")
        made._compile_all_devices = True
        return made


@compiles
@pytest.mark.parametrize("how", [{}, *cases.rest({"num_beams": 2, "prefill_chunk_size": 13})], ids=["greedy", "beams"])
def test_compiled_steps_write_the_same_tokens(how: dict[str, Any]) -> None:
    """One graph for all steps, and for a second call with a cache of its own."""
    model, graphs = converted_model("llama" if how else "qwen3"), Graphs()
    for lengths in ((40, 33), (27, 30)):  # the second prompt leaves room in a cache of the first one's length
        ids, mask = left_padded(*lengths)
        compiled = {"cache_implementation": "static", "compile_config": graphs.config()}
        written = generate(model, ids, attention_mask=mask, **compiled, **how)
        assert torch.equal(written, generate(model, ids, attention_mask=mask, **how))
        assert graphs.count == 1


@compiles
def test_compiled_and_other_steps_alternate() -> None:
    """Counts of columns agree, whoever has counted."""
    model, text, graphs = converted_model(num_hidden_layers=1), token_ids(2, 60), Graphs()
    compiled = torch.compile(model, fullgraph=True, backend=graphs)
    cache = StaticCache(config=model.config, max_cache_len=60)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits

    def advance(call: Any, start: int, stop: int, **kwargs: Any) -> None:
        logits = call_with(call, text[:, start:stop], cache, **kwargs)
        torch.testing.assert_close(logits, expected[:, start:stop], atol=1e-4, rtol=0)
        assert int(cache.get_seq_length()) == stop

    advance(model, 0, 40)
    for first in (40, 41):
        advance(compiled, first, first + 1)
    advance(model, 42, 50)
    cache.crop(-3)
    advance(compiled, 47, 48)
    assert graphs.count == 1
    copied = copy.deepcopy(cache)
    advance(compiled, 48, 49)
    cache = copied  # in which this has not happened
    advance(compiled, 48, 49)
    mask = torch.zeros(2, 60, dtype=torch.bool)
    mask[:, :50] = True
    advance(compiled, 49, 50, attention_mask=mask)
    mask[0, 50] = True  # a 0 leaves the token out
    call_with(compiled, text[:, 50:51], cache, attention_mask=mask)
    assert cache.layers[0].sequences.table.seqlens.tolist() == [51, 50]
    cache.reset()
    advance(model, 0, 57)
    for first in (57, 58, 59):
        advance(compiled, first, first + 1)


@compiles
def test_other_calls_with_a_cache_are_not_compiled() -> None:
    model, ids = converted_model(num_hidden_layers=1), token_ids(2, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    empty, full = (StaticCache(config=model.config, max_cache_len=20) for _ in range(2))
    dynamic = DynamicCache()
    for cache in (full, dynamic):
        call_with(model, ids, cache)
    for tokens, cache, keywords, message in (
        (12, empty, {}, r"must be a StaticCache that holds a prompt.* got StaticCache and 12 tokens"),
        (1, empty, {}, "must be a StaticCache that holds a prompt"),
        (2, full, {}, "got StaticCache and 2 tokens"),
        (1, full, {"attention_mask": torch.ones(2, 13)}, r"must be \[B,max_cache_len\] = \[2, 20\] in torch\.compile"),
        (1, dynamic, {}, r"must be a StaticCache that holds a prompt.* got DynamicCache"),
    ):
        with pytest.raises(Exception, match=message):
            call_with(compiled, ids[:, :tokens], cache, **keywords)


# Caches


@pytest.mark.parametrize("make", [DynamicCache, None], ids=["dynamic", "static"])
def test_a_cache_is_taken_over_and_does_what_transformers_asks(make: Any) -> None:
    model = converted_model()
    cache = DynamicCache() if make else StaticCache(config=model.config, max_cache_len=100)
    text = token_ids(3, 60)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits

    def advance(rows: Tensor, start: int, stop: int) -> None:
        logits = call_with(model, text[rows][:, start:stop], cache)
        torch.testing.assert_close(logits, expected[rows][:, start:stop], atol=1e-4, rtol=0)
        assert cache.get_seq_length() == stop

    rows = torch.arange(3)
    advance(rows, 0, 40)
    assert all(isinstance(layer, CacheLayer) for layer in cache.layers)
    assert len(cache) == 2
    assert cache.get_mask_sizes(5, 0) == (45 if make else 100, 0)
    assert cache.get_max_length() == (-1 if make else 100)
    assert (cache.batch_size, cache.is_compileable, cache.is_croppable) == (3, make is None, True)
    advance(rows, 40, 45)
    cache.crop(-7)
    cache.crop(0)
    advance(rows, 38, 47)
    saved = copy.deepcopy(cache)
    order = torch.tensor([2, 0, 2])
    cache.reorder_cache(order)
    advance(order, 47, 48)
    cache.batch_select_indices(torch.tensor([0, 1]))
    advance(order[:2], 48, 50)
    cache.batch_repeat_interleave(2)
    advance(torch.tensor([2, 2, 0, 0]), 50, 57)
    cache.batch_select_indices(torch.tensor([False, True, True, False]))
    advance(torch.tensor([2, 0]), 57, 58)
    cache.reset()
    assert cache.get_seq_length() == 0
    advance(torch.tensor([1, 0]), 0, 20)
    with pytest.raises(ValueError, match="2 rows of the cache, got 3"):
        advance(rows, 20, 40)
    cache.reset()
    advance(rows, 0, 20)
    cache = saved  # nothing of this was done to the copy
    advance(rows, 47, 60)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_what_is_made_in_inference_mode_goes_on_outside(static: bool) -> None:
    model, text = converted_model(num_hidden_layers=1), token_ids(2, 24)
    with torch.inference_mode():
        expected = model(text, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=40) if static else DynamicCache()
        call_with(model, text[:, :20], cache)
        copied, repeated = copy.deepcopy(cache), copy.deepcopy(cache)
        repeated.batch_repeat_interleave(2)
    for each, rows in ((cache, text), (copied, text), (repeated, text.repeat_interleave(2, 0))):
        logits = [call_with(model, rows[:, t : t + 1], each) for t in range(20, 24)]
        wanted = expected.repeat_interleave(len(rows) // 2, 0)[:, 20:]
        torch.testing.assert_close(torch.cat(logits, 1), wanted, atol=1e-4, rtol=0)


def test_an_empty_cache_takes_any_batch_and_dtype() -> None:
    """Also one whose first step has raised, and one that was reset."""
    model, text = converted_model(), token_ids(3, 20)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits
    cache = DynamicCache()

    def fail(*_: Any) -> None:
        raise MemoryError

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(MemoryError):
        call_with(model, text, cache)
    hook.remove()
    for rows in (text[:2], text[:1], text):
        logits = [call_with(model, rows[:, :15], cache), call_with(model, rows[:, 15:], cache)]
        torch.testing.assert_close(torch.cat(logits, 1), expected[: len(rows)], atol=1e-4, rtol=0)
        cache.reset()


def test_fp64_stays_under_autocast() -> None:
    model, ids = converted_model(num_hidden_layers=1).double(), token_ids(2, 20)
    with torch.autocast("cpu", torch.bfloat16):
        written = generate(model, ids)
        assert torch.equal(written, generate(model, ids, use_cache=False))


@compiles
@pytest.mark.parametrize("gates", ["query", *cases.rest("learned", "hidden")])
def test_padded_rows_go_on_in_a_cache(gates: str) -> None:
    """Positions count on from each row's tokens, with a mask and without, compiled and not."""
    model = converted_model(gates=gates, num_hidden_layers=1).double()
    ids, mask = left_padded(20, 3)
    cache = StaticCache(config=model.config, max_cache_len=31)
    call_with(model, ids, cache, attention_mask=mask)
    more = token_ids(2, 11)
    ones = torch.cat([mask, torch.ones(2, 11, dtype=torch.long)], 1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    logits = [call_with(model, more[:, :6], cache, attention_mask=ones[:, :26])]
    logits.append(call_with(compiled, more[:, 6:7], cache, attention_mask=ones))
    logits.append(call_with(model, more[:, 7:10], cache))
    logits.append(call_with(compiled, more[:, 10:], cache))
    for row, length in enumerate((20, 3)):
        text = torch.cat([ids[row : row + 1, 20 - length :], more[row : row + 1]], 1)
        with torch.no_grad():
            expected = model(text, use_cache=False).logits[0, -11:]
        torch.testing.assert_close(torch.cat(logits, 1)[row], expected, atol=1e-4 * 2**-29, rtol=0)  # fp64, not fp32


def test_calls_that_do_not_fit_a_cache_are_refused() -> None:
    """And change nothing."""
    model, ids = converted_model(), token_ids(2, 20)
    cache, foreign, right = DynamicCache(), DynamicCache(), DynamicCache()
    full = StaticCache(config=model.config, max_cache_len=20)
    for each in (cache, full):
        call_with(model, ids, each)
    call_with(model, ids, right, attention_mask=torch.ones(2, 20).tril(18))
    foreign.update(torch.zeros(2, 2, 5, 16), torch.zeros(2, 2, 5, 16), 0)
    offloaded = DynamicCache(config=model.config, offloading=True)
    packed = {"position_ids": torch.tensor([[20, 21, 0, 1]])}
    holes = {"attention_mask": torch.cat([torch.ones(1, 21), torch.ones(1, 21).triu(5)])}
    refused: list[tuple[Any, Tensor, Any, dict[str, Any], str]] = [
        (
            model,
            ids[:, :5],
            cache,
            {"attention_mask": torch.ones(2, 5)},
            r"attention_mask must be \[B,N_k\] = \[2, 25\]",
        ),
        (model, ids[:, :4], cache, packed, "a cache holds no packed documents"),
        (converted_model(num_hidden_layers=1), ids, cache, {}, "other options of NSA"),
        (model, ids[:, :1], full, {}, "max_cache_len=20 tokens, got 21"),
        (model, ids, foreign, {}, "5 tokens of another attention"),
        (model, ids, offloaded, {}, "got an offloaded DynamicCache"),
        (model, ids, object(), {}, "got object"),
        (model, ids[:, :1], cache, holes, r"texts' \[20, 20\] tokens in its first 20 columns, .* got \[20, 15\]"),
        (model, ids[:, :1], right, {}, "padded the cached texts to the right"),
    ]
    for called, tokens, given, keywords, message in refused:
        with pytest.raises(ValueError, match=message):
            call_with(called, tokens, given, **keywords)
    with pytest.raises(NotImplementedError, match="pages for NSA"):
        cache.update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), 0)
    with pytest.raises(ValueError, match="tokens_to_remove must be -n"):
        cache.crop(4)
    assert cache.get_seq_length() == 20
    skipping = torch.ones(2, 21)
    skipping[0, 20] = 0
    call_with(model, ids[:, :1], cache, attention_mask=skipping)
    with pytest.raises(ValueError, match="crop counts columns from the end, and in some sequences padding"):
        cache.crop(-1)


def test_a_cache_belongs_to_one_thread_at_a_time() -> None:
    model, ids, cache = converted_model(), token_ids(1, 20), DynamicCache()
    entered, go_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        entered.set()
        assert go_on.wait(30)

    hook = model.model.layers[1].register_forward_pre_hook(wait)
    with while_running(lambda: call_with(model, ids, cache), entered, go_on) as first:
        for call in (lambda: call_with(model, token_ids(2, 5), cache), cache.reset):
            with pytest.raises(RuntimeError, match=MESSAGE):
                call()
    hook.remove()
    with torch.no_grad():
        assert torch.equal(first.result(), model(ids).logits)
    call_with(model, ids, cache)
    assert cache.get_seq_length() == 40
