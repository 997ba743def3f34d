"""Decode steps as CUDA graphs: without them a GPU waits for Python."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any, Callable

import torch
from torch import Tensor

from .cache import KvantCache
from .steps import steps_of

_CONSTANTS = (type(None), bool, int, float, str)
_NAMED = ("input_ids", "attention_mask", "position_ids", "past_key_values")


def capture(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Returns a function that replays the work of `function`, and its result, which every replay
    writes again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = function()
    return graph.replay, made


class _Call:
    """A decode step of a model with fixed arguments. A call with an equal key can replay it."""

    def __init__(
        self,
        forward: Callable[..., Any],
        key: Any,
        ids: Tensor,
        positions: Tensor,
        options: dict[str, Any],
    ):
        self.forward, self.key, self.options = forward, key, options
        with torch.inference_mode(False):
            self.ids, self.positions = torch.empty_like(ids), torch.empty_like(positions)
        self.replay: Callable[[], None] | None = None
        self.made: Any = None
        self.calls = 0
        self.capturing = False

    def __call__(self, cache: KvantCache, ids: Tensor, positions: Tensor) -> Any:
        self.ids.copy_(ids)
        self.positions.copy_(positions)
        run = functools.partial(
            self.forward,
            input_ids=self.ids,
            position_ids=self.positions,
            past_key_values=cache,
            **self.options,
        )
        self.calls += 1
        if self.calls == 1:  # libraries allocate and load kernels in a first call
            return run()
        if self.replay is None:
            self.capturing = True
            self.replay, self.made = capture(run)
            self.capturing = False
            self.made["past_key_values"] = None  # the graph does not keep the cache alive
        self.replay()
        made = {name: x.clone() if torch.is_tensor(x) else x for name, x in self.made.items()}
        return type(self.made)(**made | {"past_key_values": cache})


class _Graphs:
    def __init__(self, model: Any) -> None:
        self.forward = model.forward
        self.config = weakref.ref(model.config)
        self.calls: weakref.WeakKeyDictionary[KvantCache, _Call] = weakref.WeakKeyDictionary()
        self.unable = False  # some operator of the model cannot be captured

    def _step(self, options: dict[str, Any]) -> Any:
        """The output of a step, or None for a call that no graph replays."""
        ids, mask, positions, cache = (options.get(name) for name in _NAMED)
        others = {name: value for name, value in options.items() if name not in _NAMED}
        if (
            self.unable
            or not isinstance(cache, KvantCache)
            or not torch.is_tensor(ids)
            or ids.dim() != 2
            or ids.shape[1] != 1
        ):
            return None
        plain = all(isinstance(value, _CONSTANTS) for value in others.values())
        wanted = any(
            others.get(name) for name in ("output_attentions", "output_hidden_states", "labels")
        )
        config = self.config()
        implementation = config.get_text_config()._attn_implementation if config is not None else ""
        if (
            not plain
            or wanted
            or torch.is_grad_enabled()
            or implementation != "kvant"
            or others.get("return_dict") is False
        ):
            return None
        if mask is not None and (not torch.is_tensor(mask) or mask.dim() != 2):
            return None
        return self._take(cache, ids, mask, positions, others)

    def _take(
        self,
        cache: KvantCache,
        ids: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        others: Any,
    ) -> Any:
        if not cache._step_fits(ids, mask):
            return None
        steps = steps_of(cache)
        if steps is None:
            return None
        if positions is None:
            positions = ids.new_full((1, 1), cache.get_seq_length())
        graphs = tuple(one.graph for _, one in steps)
        key = (
            graphs,
            ids.shape,
            ids.dtype,
            positions.shape,
            positions.dtype,
            tuple(sorted(others.items())),
        )
        call = self.calls.get(cache)
        if call is None or call.key != key:
            call = self.calls[cache] = _Call(self.forward, key, ids, positions, others)
        begun = []
        try:
            for store, one in steps:
                one.next(store)
                one.running = True
                begun.append(one)
            return call(cache, ids, positions)
        except BaseException as error:
            self.calls.pop(cache, None)
            for layer in cache.layers:
                layer.pending = None
            for one in begun:
                one.taken -= 1
                one.left = one.taken
            self.unable = call.capturing and isinstance(error, RuntimeError)
            if not self.unable:
                raise
            warnings.warn(
                "kvant.transformers.graphs: this model decodes without graphs, because a "
                f"graph cannot hold all of it: {error}"
            )
            return None
        finally:
            for one in begun:
                one.running = False


def graphs(model: Any) -> Any:
    """Makes model replay its decode steps with a KvantCache as CUDA graphs, also in generate;
    returns model. Calls of other kinds, and with other caches, are unchanged. A step whose mask
    hides more than the prompt's padding is computed without a graph. After a warning, so are all
    steps of a model with operators that cannot be captured."""
    if not isinstance(getattr(model.forward, "graphs", None), _Graphs):
        made = _Graphs(model)

        @functools.wraps(made.forward)
        def forward(*arguments: Any, **options: Any) -> Any:
            named = {**options, "input_ids": arguments[0]} if len(arguments) == 1 else options
            found = None if len(arguments) > 1 else made._step(named)
            return made.forward(*arguments, **options) if found is None else found

        forward.graphs = made  # type: ignore[attr-defined]
        model.forward = forward
    return model
