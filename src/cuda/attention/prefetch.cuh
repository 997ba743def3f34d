/* prefetch.cuh - what a decode kernel asks memory for before it needs it: its arguments, tables,
 * queries, numbers of channels, and where it will write. It does not use the loaded numbers. */
#pragma once

#include "attention.h"
#include "query.cuh"

#include <type_traits>

namespace kvant
{

/* Loads the arguments into the constant cache. Every warp reads one line of them, so the lines
 * arrive together. A kernel begins with cold caches. Once pages are on their way, every other
 * load queues behind them: loading a query took 4 us that way. So the kernel asks for everything
 * that it needs before the first page at once. Tables of chunks are left out, because they are
 * far longer. */
template <class A> KVANT_INLINE void prefetch_arguments(const A &p, int warp)
{
    const uint32_t *words = reinterpret_cast<const uint32_t *>(&p);
    uint32_t any = 0;
    constexpr bool CHUNKS = std::is_same<A, ChunkAttentionArgs>::value;
    constexpr int WORDS = (int)((CHUNKS ? sizeof(AttentionArgs) : sizeof(A)) / 4);
    for (int i = 16 * warp; i < WORDS; i += 16 * (blockDim.x / 32))
        any |= words[i];
    asm volatile("" ::"r"(any));
}

/* Brings tables and queries into the second-level cache while lengths are read. Each thread of the
 * grid asks for one line. */
template <int D> KVANT_INLINE void prefetch(const AttentionArgs &p)
{
    const size_t line = 128 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    const size_t last = p.batch - 1, last_head = p.kv_heads * p.heads_a_kv - 1;
    if (line < (last * p.table_stride + p.max_tokens / PAGE_TOKENS) * sizeof *p.table)
        prefetch_line(p.table, line);
    if (p.matrices && line < last * p.table_stride + p.max_tokens / PAGE_TOKENS)
        prefetch_line(p.matrices, line);
    const size_t numbers = last * p.q_batch_stride + (p.query_tokens - 1) * p.q_token_stride +
                           last_head * p.q_head_stride + D;
    if (!p.query_starts && line < numbers * (p.type == KVANT_CUDA_F32 ? 4 : 2))
        prefetch_line(p.q, line);
}

/* Brings tables, queries, and a line of the memory that the block will write to. The GPU looks the
 * translation of an address up in memory if nobody used the address for long. */
template <int D> KVANT_INLINE void request_all(const AttentionArgs &p)
{
    prefetch<D>(p);
    if (threadIdx.x == 0)
        prefetch_line(p.counters, sizeof(uint32_t) * MOST_COLUMNS * blockIdx.x);
    if (threadIdx.x == 32)
        prefetch_line(p.partials, 2 * sizeof(float) * partial_floats(D) * blockIdx.x);
    if (threadIdx.x == 64)
        prefetch_line(p.out, 0);
    if (threadIdx.x == 96 && p.newest.cells)
        prefetch_line(p.newest.cells, 0);
}

/* Brings numbers of channels and of pages' centres. No kernel of a decode step writes them. */
template <int D> KVANT_INLINE void request_channels(const AttentionArgs &p)
{
    const size_t line = 128 * ((size_t)blockIdx.x * blockDim.x + threadIdx.x);
    if (p.k_center && line < p.n_matrices * p.kv_heads * D * sizeof(float))
        prefetch_line(p.k_center, line);
    for (const float *numbers : { p.k_scale, p.v_scale, p.v_center })
        if (numbers && line < p.kv_heads * D * sizeof(float))
            prefetch_line(numbers, line);
    if (!p.block_centers.start)
        return;
    if (line < D * sizeof(uint16_t))
        prefetch_line(p.block_centers.pairs, line);
    if (line < p.n_matrices * p.kv_heads * D * sizeof(float))
        prefetch_line(p.block_centers.start, line);
    if (line < ((p.batch - 1) * p.table_stride + p.max_tokens / PAGE_TOKENS) * D * sizeof(float))
        prefetch_line(p.block_centers.phases, line);
}

} // namespace kvant
