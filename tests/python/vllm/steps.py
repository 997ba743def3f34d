"""vLLM's backends without an engine, for the tests: a backend's implementation, steps as vLLM
describes their batches, and attention in float64.
"""

import contextlib
import pathlib
import sys
import types
from unittest import mock

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "pytorch")]

import torch  # noqa: E402
from common import np  # noqa: E402
from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: E402

import kvant  # noqa: E402
from kvant.vllm import batch, chosen, codecs, gpu, impl, pages  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KV_HEADS, GROUP, DIM, BLOCKS = 2, 4, 64, 40
HEADS = KV_HEADS * GROUP
LAYER = 1  # the first layer's keys may have another codec
# The sequences of one batch: each has a number of tokens, of which the last ones are queries.
DECODES = [(1, 1), (70, 1), (200, 1)]
DRAFTS = [(67, 4), (130, 2), (5, 5)]
CHUNKS = [(104, 40), (300, 110)]
PROMPTS = [(30, 30), (129, 129)]
LONG = [(500, 200), (329, 129)]  # their past is unpacked to rows


class CpuImpl(impl.Impl):
    Pages = pages.LayerPages


def made_impl(
    stored,
    calibration=None,
    window=None,
    softcap=None,
    sinks=None,
    rank=0,
    n_ranks=1,
    total=KV_HEADS,
    kind=gpu.Impl,
    dtype="auto",
    block_size=64,
    settings=None,
    **others,
):
    """settings: more parts of vLLM's configuration."""
    model = types.SimpleNamespace(
        model=None, get_total_num_kv_heads=lambda: total, get_num_layers=lambda parallel: 2
    )
    cache = types.SimpleNamespace(
        user_specified_block_size=True, block_size=block_size, kv_cache_memory_bytes=1 << 24
    )
    parts = dict(
        model_config=model,
        cache_config=cache,
        compilation_config=types.SimpleNamespace(static_forward_context={}),
        parallel_config=None,
        scheduler_config=types.SimpleNamespace(max_num_seqs=4),
    )
    config = types.SimpleNamespace(**parts | (settings or {}))
    environment = {"KVANT_VLLM": stored} | (
        {"KVANT_VLLM_CALIBRATION": str(calibration)} if calibration else {}
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", environment))
        stack.enter_context(mock.patch.object(impl, "get_current_vllm_config", lambda: config))
        stack.enter_context(mock.patch.object(impl, "get_tensor_model_parallel_rank", lambda: rank))
        stack.enter_context(
            mock.patch.object(impl, "get_tensor_model_parallel_world_size", lambda: n_ranks)
        )
        made = object.__new__(kind)
        made.__init__(
            HEADS, DIM, DIM**-0.5, KV_HEADS, None, window, dtype, softcap, sinks=sinks, **others
        )
    made.flash = None
    return made


def made_builder(drafts=0, spec=None):
    speculative = (
        types.SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
        if drafts
        else None
    )
    parallel = types.SimpleNamespace(decode_context_parallel_size=1)
    config = types.SimpleNamespace(
        speculative_config=speculative, parallel_config=parallel, use_v2_model_runner=True
    )
    return batch.Builder(spec, ["layer"], config, torch.device(DEVICE))


class Step:
    """A batch of sequences in blocks of any order. Tokens that are no queries were written
    before.
    """

    def __init__(self, sequences, dtype, layer=LAYER):
        self.sequences = sequences
        random = torch.Generator().manual_seed(sum(n for n, _ in sequences))
        self.number = layer
        self.layer = types.SimpleNamespace(layer_name=f"model.layers.{layer}.attn")
        order = torch.randperm(BLOCKS - 1, generator=random) + 1
        most = max(-(-n // 64) for n, _ in sequences) + 1
        self.table, at = torch.zeros(len(sequences), most, dtype=torch.int32), 0
        self.rows = []
        for i, (n, _) in enumerate(sequences):
            blocks = -(-n // 64)
            self.table[i, :blocks] = order[at : at + blocks]
            at += blocks
            shape = n, KV_HEADS, DIM
            self.rows.append([(torch.randn(shape, generator=random) + 0.3).to(dtype) for _ in "kv"])
        counts = torch.tensor([0, *(m for _, m in sequences)])
        self.starts = counts.cumsum(0).to(torch.int32)
        self.queries = torch.randn(int(self.starts[-1]), HEADS, DIM, generator=random).to(dtype)

    def slots(self, i, first, last):
        tokens = torch.arange(first, last)
        return self.table[i].to(torch.int64)[tokens // 64] * 64 + tokens % 64

    def newest(self):
        """Keys, values and slots of the queries' tokens."""
        parts = [(n - m, n) for n, m in self.sequences]
        rows = [
            torch.cat([kv[role][a:b] for kv, (a, b) in zip(self.rows, parts)]) for role in (0, 1)
        ]
        return *rows, torch.cat([self.slots(i, *part) for i, part in enumerate(parts)])

    def common(self, **named):
        lengths = torch.tensor([n for n, _ in self.sequences], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=self.starts.to(DEVICE),
            query_start_loc_cpu=self.starts,
            seq_lens=lengths.to(DEVICE),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(self.sequences),
            num_actual_tokens=int(self.starts[-1]),
            max_query_len=max(m for _, m in self.sequences),
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.table.to(DEVICE),
            slot_mapping=self.newest()[2].to(DEVICE),
            **named,
        )

    def run(self, layer_impl, metadata):
        memory = made_memory(layer_impl, self.number)
        for i, (n, m) in enumerate(self.sequences):
            layer_impl.do_kv_cache_update(
                self.layer,
                *(x[: n - m].to(DEVICE) for x in self.rows[i]),
                memory,
                self.slots(i, 0, n - m).to(DEVICE),
            )
        *rows, slots = (x.to(DEVICE) for x in (self.queries, *self.newest()))
        n = len(slots)
        metadata.slot_mapping = torch.cat([slots, slots.new_full((3,), -1)])  # as vLLM pads batches
        q, k, v = (torch.cat([x, torch.full_like(x[:1], 7).expand(3, -1, -1)]) for x in rows)
        out = torch.full_like(q, float("nan")).reshape(len(q), -1)
        layer_impl.forward(self.layer, q, k, v, memory, metadata, out)
        return out.view(-1, HEADS, DIM)[:n].float().cpu().numpy()

    def expected(self, kept, **options):
        return np.concatenate(
            [
                attention(self.queries[self.starts[i] : self.starts[i + 1]], *kept(k, v), **options)
                for i, (k, v) in enumerate(self.rows)
            ]
        )


def made_memory(layer_impl, layer=LAYER):
    cell = codecs.cell_bytes(layer_impl.stored.of_layer(layer), DIM)
    return torch.zeros(BLOCKS, KV_HEADS, 64, cell, dtype=torch.uint8, device=DEVICE)


def attention(q, k, v, window=0, softcap=0.0, sinks=None, chunk=1 << 20):
    q, k, v = (
        np.asarray(x.float() if torch.is_tensor(x) else x, dtype=np.float64) for x in (q, k, v)
    )
    k, v = (np.repeat(x, GROUP, 1) for x in (k, v))
    scores = np.einsum("qhd,thd->hqt", q, k) * DIM**-0.5
    scores = softcap * np.tanh(scores / softcap) if softcap else scores
    at, token = np.arange(len(k) - len(q), len(k))[:, None], np.arange(len(k))
    seen = (token <= at) & (at - token < (window or len(k))) & (at // chunk == token // chunk)
    weights = np.where(seen, np.exp(scores), 0)
    total = weights.sum(-1) + (0 if sinks is None else np.exp(sinks)[:, None])
    return np.einsum("hqt,thd->qhd", weights / total[..., None], v)


def round_trip(layer_impl, layer=LAYER):
    """Rows as the codecs of a layer keep them."""

    def kept(*rows):
        found = []
        for role, x in zip("kv", rows):
            pages = kvant.Tensor(
                codecs.codecs(
                    layer_impl.stored.of_layer(layer), role, DIM, layer, layer_impl.heads
                ),
                n_blocks=BLOCKS,
            )
            pages.write(np.arange(len(x)), x.float().numpy())
            found.append(pages.read(0, len(x)))
        return found

    return kept


def captured(run):
    """The test makes one run first, as vLLM does to warm up."""
    run()
    if DEVICE == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def chosen_as(name):
    with mock.patch.dict("os.environ", KVANT_VLLM=name):
        return chosen()
