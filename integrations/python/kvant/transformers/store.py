"""The layers of a model with equal shapes and windows, in one kvant.Cache. Each row of the batch is
a sequence, which begins with the row's first token that is not padding."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import Tensor

from .. import torch as operators
from ..cache import Cache
from ..library import PAGE_TOKENS, Error
from .masks import Shape
from .steps import Steps

_HID = (
    "attention_mask: it shows tokens that it hid in an earlier call, and hidden tokens at the "
    "beginning are not stored; give every call the mask of the whole sequence"
)
SLACK = 256  # tokens before a window that are kept, so that a few tokens may be removed again


class Sequences:
    """Sequences of a kvant.Cache that are freed with this object. Copies of a Store share the
    cache."""

    numbers: list[int] = []  # for objects that torch.compile makes without __init__, and frees

    def __init__(self, cache: Cache, numbers: list[int]) -> None:
        self.cache, self.numbers = cache, numbers

    def select(self, rows: Sequence[int]) -> None:
        """Row i gets the content of the former row rows[i]. Sequences that no row uses are freed
        first, so that their room is there for copies. After an error there are no sequences."""
        old, taken = self.numbers, set()
        self.numbers = [old[row] for row in dict.fromkeys(rows)]
        for number in set(old) - set(self.numbers):
            self.cache.free(number)
        made = []
        try:
            for row in rows:
                made.append(self.cache.fork(old[row]) if row in taken else old[row])
                taken.add(row)
        except Error:
            for number in {*self.numbers, *made}:
                self.cache.free(number)
            self.numbers = []
            raise
        self.numbers = made

    def fork(self) -> Sequences:
        made = Sequences(self.cache, [])
        for number in self.numbers:
            made.numbers.append(self.cache.fork(number))
        return made

    def __del__(self) -> None:
        for number in self.numbers:
            try:
                self.cache.free(number)
            except ValueError:  # the cache was closed
                return


class Store:
    """`starts`: for each row the position of its first stored token. `lengths`: for each layer, by
    its number in the model, its tokens with padding."""

    def __init__(self, window: int, keeps_past: bool, layers: Sequence[int]) -> None:
        self.window = window
        self.places = {layer: place for place, layer in enumerate(layers)}  # in the kvant.Cache
        self.sequences: Sequences | None = None
        self.device: torch.device | None = None  # of its rows
        self.starts: list[int] = []
        self.lengths: dict[int, int] = {}
        self.keeps_past = (
            keeps_past  # transformers will take tokens back: nothing is dropped until then
        )
        self.steps: Steps | None = None  # of a CUDA graph
        self.kept_from = 0  # tokens before this one may have been dropped

    @property
    def cache(self) -> Cache | None:
        return None if self.sequences is None else self.sequences.cache

    @property
    def batch(self) -> int:
        return len(self.starts)

    def length(self, layer: int) -> int:
        return self.lengths[layer] + (self.steps.taken if self.steps else 0)

    def settle(self) -> None:
        """Appends the rows of steps."""
        if self.steps:
            self.steps.settle(self)

    def begin(self, k: Tensor, v: Tensor, make: Any) -> None:
        """Called before rows are written. make(k, v) makes the kvant.Cache when the first rows show
        the number of sequences and the device."""
        self.settle()
        if self.sequences is None:
            cache, self._number, self._state = make(k, v, list(self.places))
            self.sequences, self.device = Sequences(cache, []), k.device
        if not self.starts:
            self.sequences.numbers = [
                self.sequences.cache.new_sequence() for _ in range(k.shape[0])
            ]
            self.starts = [0] * k.shape[0]
        if len(self.sequences.numbers) != self.batch:
            raise RuntimeError("the cache lost sequences in a call that failed: begin a new one")
        if self.batch != k.shape[0]:
            raise ValueError(f"key_states: {k.shape[0]} sequences, but the cache has {self.batch}")

    def _begin(self, row: int, length: int, n: int, hidden: int) -> None:
        """Sets where a row begins that has no stored tokens yet: after its padding. The first layer
        of a pass sets it for all layers."""
        if length > self.starts[row]:
            return
        first = min(max(hidden, length), length + n)
        if max(self.lengths.values()) == length:
            self.starts[row] = first
        elif min(self.starts[row], length + n) != first:
            raise ValueError("attention_mask: layers disagree about where a sequence begins")

    def _place(self, layer: int, n: int, hidden: Sequence[int] | None) -> list[int]:
        """How many of n new tokens each row stores. Padding at the beginning of a row is not
        stored, so that statistics and the tokens that stay fp16 come from the text."""
        length = self.lengths[layer]
        for row in range(self.batch):
            self._begin(row, length, n, 0 if hidden is None else hidden[row])
        return [length + n - max(length, min(start, length + n)) for start in self.starts]

    def append(
        self,
        layer: int,
        k: Tensor,
        v: Tensor,
        hidden: Sequence[int] | None,
        q: Tensor | None = None,
    ) -> None:
        """k and v: [batch, kv heads, n, head_dim]. `hidden`: for each row the number of padding
        tokens at its beginning; None: it is not known, and all are stored. `q`: the queries of the
        same tokens."""
        n = k.shape[2]
        counts = self._place(layer, n, hidden)
        assert self.sequences is not None
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        # The queries of a single token may come with attention.
        q = None if q is None or n == 1 or q.shape[2] != n else q.transpose(1, 2)
        append, place = torch.ops.kvant.cache_append, self.places[layer]
        try:
            if min(counts) == n:
                append(self._state, k, v, self._number, place, self.sequences.numbers, q)
            else:
                for row, count in enumerate(counts):
                    if count:
                        part = slice(row, row + 1), slice(n - count, n)
                        here = self.sequences.numbers[row : row + 1]
                        append(
                            self._state,
                            k[part],
                            v[part],
                            self._number,
                            place,
                            here,
                            None if q is None else q[part],
                        )
        except Error as error:
            self._take_back(layer)
            if error.status != 60:
                raise
            raise RuntimeError(
                f"{error}; give KvantCache max_tokens, of all sequences together"
            ) from error
        self.lengths[layer] += n

    def _take_back(self, layer: int) -> None:
        """Called after an append that may have written some rows of the batch. If another layer has
        more tokens, crop takes the rows away, which the cache needs before its next pass."""
        assert self.sequences is not None
        if max(self.lengths.values()) == self.lengths[layer]:
            for start, number in zip(self.starts, self.sequences.numbers):
                self.sequences.cache.truncate(number, max(self.lengths[layer] - start, 0))

    def attend(
        self,
        layer: int,
        q: Tensor,
        mask: Tensor | None,
        shape: Shape | None,
        causal: bool,
        how: dict[str, Any],
    ) -> Tensor:
        """`q`: [batch, heads, n, head_dim], of the newest n tokens. shape None: mask has four
        dimensions and hides everything that must be hidden. `how`: scale, softcap, sinks, exact and
        v_head_dim of cache_attend."""
        assert self.sequences is not None
        n, length, q = q.shape[2], self.lengths[layer], q.transpose(1, 2)
        options = how | dict(causal=shape is not None and causal)
        if shape is not None:
            options["window"] = shape.window
        starts = tuple(
            min(start, length) for start in self.starts
        )  # a later part of the prompt may hold the first token
        if shape is not None and any(hidden < start for hidden, start in zip(shape.hidden, starts)):
            raise ValueError(_HID)
        plain = shape is not None and not shape.holes and shape.hidden == starts
        assert self.cache is not None
        if plain and max(starts) <= length - n:
            # The cache's own options are its defaults, and with defaults one call takes all rows.
            if options["scale"] == self.cache.scale:
                options["scale"] = None
            if options["softcap"] == self.cache.logit_softcap:
                options["softcap"] = None
            return self._call(layer, q, self.sequences.numbers, **options)
        out = q.new_zeros((*q.shape[:3], options["v_head_dim"]))
        for row, number in enumerate(self.sequences.numbers):
            count = min(n, length - starts[row])  # queries of padding see nothing
            if count > 0:
                options["mask"] = None if plain else self._added(mask, row, count, length)
                part = slice(row, row + 1), slice(n - count, n)
                out[part] = self._call(layer, q[part], [number], **options)
        return out

    def _call(self, layer: int, q: Tensor, numbers: list[int], **options: Any) -> Tensor:
        place = self.places[layer]
        return torch.ops.kvant.cache_attend(self._state, q, self._number, place, numbers, **options)

    def _added(self, mask: Tensor | None, row: int, n: int, length: int) -> Tensor | None:
        """The numbers, float16 [1, n, tokens], that the mask adds to the scores of a row's newest n
        queries."""
        if mask is None:
            return None
        whole = (
            mask[row, :length].expand(n, length)
            if mask.dim() == 2
            else mask[row % mask.shape[0], 0, -n:, :length]
        )
        if whole.dtype == torch.bool:
            added = torch.zeros(whole.shape, dtype=torch.float16, device=whole.device).masked_fill(
                ~whole, -torch.inf
            )
        else:
            added = whole.masked_fill(whole <= torch.finfo(torch.float16).min, -torch.inf).to(
                torch.float16
            )
        if (added[:, : self.starts[row]] > -torch.inf).any():
            raise ValueError(_HID)
        return added[None, :, self.starts[row] :]

    def read(self, layer: int, length: int, like: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The rows of the first `length` tokens, [batch, kv heads, length, head_dim]; zeros for
        padding that was not stored and for tokens that were dropped."""
        self.settle()
        assert self.sequences is not None and self.cache is not None
        made = tuple(x.new_zeros((self.batch, x.shape[1], length, x.shape[3])) for x in like)
        for row, number in enumerate(self.sequences.numbers):
            count = length - self.starts[row]
            if count > 0:
                for to, rows in zip(
                    made, operators.read(self.cache, self.places[layer], number, count, like[0])
                ):
                    to[row, :, self.starts[row] :] = rows.transpose(0, 1)
        k, v = made
        return k, v

    def drop(self) -> None:
        """Called between two passes of the model: forgets blocks that no window reaches any
        more."""
        if not self.window or self.sequences is None:
            return
        for start, number in zip(self.starts, self.sequences.numbers):
            old = min(self.lengths.values()) - start - self.window - SLACK
            if old >= PAGE_TOKENS:
                self.sequences.cache.drop(number, old)
                self.kept_from = max(self.kept_from, start + old // PAGE_TOKENS * PAGE_TOKENS)

    def check_crop(self, length: int) -> None:
        """RuntimeError if the layers cannot get this length: tokens that a window then reaches were
        dropped, or a call that failed left layers behind that are shorter."""
        own = self.lengths.values()
        if self.sequences is None:
            return
        if 0 < length < self.kept_from + self.window:
            most = max(max(own) - self.window - self.kept_from, 0)
            raise RuntimeError(
                f"crop: a layer with a sliding window can remove at most {most} tokens, or all, "
                f"not {max(own) - length}"
            )
        if length > min(own):
            raise RuntimeError(
                f"crop: a call that failed left layers with {min(own)} tokens, so {length} cannot "
                "be kept: remove more"
            )

    def crop(self, length: int) -> None:
        """Forgets the tokens of all layers from this length on."""
        self.settle()
        if self.sequences is None:
            return
        self.check_crop(length)
        for row, number in enumerate(self.sequences.numbers):
            self.starts[row] = min(self.starts[row], length)
            self.sequences.cache.truncate(number, length - self.starts[row])
        self.lengths = dict.fromkeys(self.lengths, length)
        self.kept_from = self.kept_from if length else 0
        self.drop()

    def select(self, rows: Any) -> None:
        """Row i gets the content of the former row rows[i]. `rows` is whatever selects rows of a
        tensor: numbers, which may count from the end, booleans or a slice. IndexError for a row
        that is not there."""
        self.settle()
        if self.sequences is not None and self.starts:
            rows = rows.cpu() if torch.is_tensor(rows) else rows
            numbers = torch.arange(self.batch, device="cpu")[rows].tolist()
            self.sequences.select(numbers)
            self.starts = [self.starts[row] for row in numbers]

    def reset(self) -> None:
        if self.steps:
            self.steps.forget()  # a full cache has no room for their rows
        self.select([])
        self.starts, self.lengths, self.kept_from = [], dict.fromkeys(self.lengths, 0), 0

    def copy(self) -> Store:
        self.settle()
        made = Store(self.window, self.keeps_past, list(self.places))
        made.device = self.device
        made.starts, made.lengths = list(self.starts), dict(self.lengths)
        made.kept_from = self.kept_from
        if self.sequences is not None:
            made.sequences = self.sequences.fork()
            made._number, made._state = self._number, self._state
        return made
