"""Compares attention over kvant's pages with attention in float64 when an engine starts, on random
rows and with the codecs of one of its layers. A library for another GPU, a damaged one, or a change
of vLLM's tensors would otherwise give wrong tokens without a word."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arrays import np
from ..library import PAGE_TOKENS
from ..tensor import Tensor as Pages
from . import Stored
from .batch import Batch, Options, Part
from .codecs import calibration_of, cell_bytes, codecs
from .exact import LEAST, Pool, Slots, State

TOKENS, BLOCKS = 130, 4  # two full blocks and the beginning of a third, in a table of mixed order
LENGTHS = (1, 63, 64, 65, TOKENS)
# Kernels round softmax weights and queries to 16 bits and codebooks to bytes. The latter errs by up
# to half of 1/127 of the largest level in each number of a row, which adds up to less than 2^-5 of
# the largest output (tests/python/vllm/test_backends.py). A row of another token, head or block is
# wrong by about the outputs themselves.
_KERNELS = 2.0**-5
_checked: set[Any] = set()


class Case(NamedTuple):
    k: Tensor  #: bfloat16 [TOKENS, kv heads, head_dim]
    v: Tensor
    q: Tensor  #: [LENGTHS, heads, head_dim], of the model's dtype


def _error_of_codec(bits: float) -> float:
    """The largest relative error that a code with this many bits per number may have on Gaussian
    rows. A uniform code of b bits has steps of 2 m / (2^b - 2) over numbers of up to m, and errs by
    step / sqrt(12). m is 4 standard deviations, which rows of up to 512 numbers rarely exceed.
    Other codes are better. fp16 has 11 significant bits."""
    levels = 2 ** int(min(bits, 11)) - 2
    return 8 / 12**0.5 / levels if levels > 0 else float("inf")


def _rows(
    impl: Any, stored: Stored, role: str, layer: int, random: np.random.Generator
) -> np.ndarray:
    """Rows as the codecs expect them: standard normal, or inside of a calibration's ranges."""
    made = random.standard_normal((TOKENS, len(impl.heads), impl.head_size))
    found = calibration_of(stored)
    if found is not None:
        for i, head in enumerate(impl.heads):
            entry = found.entry(layer, head, role)
            made[:, i] = entry.mean + made[:, i] * (entry.max - entry.min) / 8
    return made


def _kept(impl: Any, stored: Stored, role: str, layer: int, rows: Tensor) -> np.ndarray:
    """The rows that remain after the codecs, by the library on the CPU."""
    pages = Pages(codecs(stored, role, impl.head_size, layer, impl.heads), n_blocks=BLOCKS)
    pages.write(np.arange(TOKENS), rows.float().numpy())
    return pages.read(0, TOKENS).astype(np.float64)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, options: Options) -> np.ndarray:
    """One query [heads, head_dim] of the last token, in float64."""
    first = max(0, len(k) - options.window) if options.window else 0
    group = len(q) // k.shape[1]
    k, v = (np.repeat(x[first:], group, 1) for x in (k, v))
    scores = options.scale * np.einsum("hd,nhd->hn", q, k)
    if options.softcap:
        scores = options.softcap * np.tanh(scores / options.softcap)
    if options.sinks is not None:
        sinks = options.sinks.detach().double().cpu().numpy()
        scores = np.concatenate([scores, sinks[:, None]], 1)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    return np.einsum("hn,nhd->hd", weights[:, : len(k)], v)


def _queries(impl: Any, k: np.ndarray, scale: float, random: np.random.Generator) -> np.ndarray:
    """Random queries, scaled so that scores have a standard deviation of 1, as with the rows of the
    tests: some tokens weigh much more than others, and no token weighs everything."""
    made = random.standard_normal((len(LENGTHS), impl.num_heads, impl.head_size))
    keys = np.repeat(k, impl.num_heads // k.shape[1], 1)
    spread = (scale * np.einsum("bhd,nhd->bhn", made, keys)).std(2, keepdims=True)
    return made / np.maximum(spread, 1e-30)


def _batch(blocks: Tensor, device: torch.device) -> tuple[Batch, Tensor]:
    """A decode step of sequences that share blocks, and the slots of their tokens."""
    n, tokens = len(LENGTHS), torch.arange(TOKENS, device="cpu")
    slots = blocks[tokens // PAGE_TOKENS] * PAGE_TOKENS + tokens % PAGE_TOKENS
    part = Part(0, n, 0, n, 1, 0, False)
    made = Batch(
        torch.arange(n + 1, dtype=torch.int32, device=device),
        torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        blocks.to(torch.int32).repeat(n, 1).to(device),
        slots[torch.tensor(LENGTHS, device="cpu") - 1].to(device),
        True,
        [part],
    )
    return made, slots.to(device)


def _plan(state: State, batch: Batch, starts: list[int], lengths: Tensor, slots: Tensor) -> None:
    table = batch.block_table[: len(lengths)]
    state.step(torch.tensor(starts, dtype=torch.int32, device=table.device), lengths, table, slots)
    if table.device.type == "cuda":  # the kernels after it read its results before it ends
        torch.cuda.synchronize(table.device)


def _found(
    impl: Any,
    stored: Stored,
    layer: int,
    case: Case,
    options: Options,
    device: torch.device,
    exact: bool,
) -> np.ndarray:
    """Attention over pages or over exact blocks, as a step of the engine computes it."""
    cell = cell_bytes(stored, impl.head_size)
    memory = torch.zeros(
        BLOCKS, len(impl.heads), PAGE_TOKENS, cell, dtype=torch.uint8, device=device
    )
    pages = impl.Pages(stored, memory, layer, impl.heads, impl.head_size)
    batch, slots = _batch(torch.tensor([3, 1, 2], device="cpu"), device)
    if exact:  # all three blocks are exact: the first one, and the newest two
        room = Slots(LEAST, LEAST)
        pages.use(Pool(room, len(impl.heads), impl.head_size, device))
        n, width = batch.block_table.shape
        batch.exact = state = State(room, BLOCKS, n, width, TOKENS, device)
        _plan(state, batch, [0, TOKENS], batch.seq_lens[-1:], slots)
        pages.write(case.k.to(device), case.v.to(device), slots, None, state)
        _plan(state, batch, [0] * (n + 1), batch.seq_lens, slots[:0])
    else:
        pages.write(case.k.to(device), case.v.to(device), slots)
    q = case.q.to(device)
    out = torch.zeros_like(q)
    pages.attend(q, out, batch, batch.parts[0], options)
    return out.double().cpu().numpy()


def check(impl: Any, layer: int, dtype: torch.dtype, options: Options) -> None:
    """RuntimeError if attention over pages is wrong. Layers with the same codecs and shape are
    checked once."""
    stored = impl.stored.of_layer(layer)
    kind = stored, impl.head_size, impl.Pages
    if kind in _checked:
        return
    _checked.add(kind)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random = np.random.default_rng(1)
    rows = [torch.from_numpy(_rows(impl, stored, role, layer, random)).bfloat16() for role in "kv"]
    kept = [_kept(impl, stored, role, layer, x) for role, x in zip("kv", rows)]
    if calibration_of(stored) is None:
        for role, before, after in zip("kv", rows, kept):
            _check_codec(stored, role, impl.head_size, before.double().numpy(), after)
    q = torch.from_numpy(_queries(impl, kept[0], options.scale, random)).to(dtype)
    sources = {f"{stored.k}/{stored.v} pages": kept}
    if impl.pool is not None:
        sources["exact blocks"] = [x.double().numpy() for x in rows]
    for what, source in sources.items():
        expected = np.stack(
            [
                attention(one, *(x[:n] for x in source), options)
                for one, n in zip(q.double().numpy(), LENGTHS)
            ]
        )
        case = Case(*rows, q)
        found = _found(impl, stored, layer, case, options, device, source is not kept)
        wrong = np.abs(found - expected).max() / np.abs(expected).max()
        if not wrong <= _KERNELS:
            raise RuntimeError(
                f"kvant: attention over {what} is wrong by {wrong:.2g} of its largest output, and "
                f"at most {_KERNELS:.2g} is right: build kvant again for this machine and this vLLM"
            )


def _check_codec(
    stored: Stored, role: str, head_dim: int, before: np.ndarray, after: np.ndarray
) -> None:
    codec = codecs(stored, role, head_dim)[0]
    most = _error_of_codec(8 * codec.page_bytes / PAGE_TOKENS / head_dim)
    wrong = np.sqrt(np.square(after - before).mean() / np.square(before).mean())
    if not wrong <= most:
        raise RuntimeError(
            f"kvant: rows that {getattr(stored, role)} keeps are wrong by {wrong:.2g} of the "
            f"model's rows, and at most {most:.2g} is right: build kvant again for this machine"
        )
