/* attention.cuh - attention of any head_dim over pages of any pair of codecs; attention.cu launches
 * it.
 *
 * A thread block processes up to 8 or 16 query rows of one kv head, and all pages that they see or
 * one of several equal parts of these pages. The block that ends last adds the parts in order.
 * Within a block, a team of 1, 2 or 4 warps has its own pages and does not wait for other teams
 * until the end. Each warp of a team has up to 128 channels. The team decodes 32 tokens at a time
 * to fp16 in shared memory (a tile), first keys, then values in the same place. It multiplies the
 * tile by mma.m16n8k16. As in decode kernels, query rows are the columns of the product; its rows
 * are tokens for scores and channels for values.
 *
 * The numbers of a token are stored as multiples of the token's unit. Weights are 2^(score +
 * log2(unit of the values) - reference), as in softmax.cuh. */
#pragma once

#include "block.cuh"

#include "../attention/softmax.cuh"

namespace kvant
{

/* Seldom called, and not inlined, because it would cost registers. */
__device__ static __noinline__ float changed(const AnyAttentionArgs &p, const AnyRows &rows,
                                             int length, float x, int row, int token)
{
    return changed_score(p, rows, length, x, row, token);
}

template <int EIGHTS, unsigned WITH> struct AnyAttention : AnyBlock<8 * EIGHTS> {
    using S = AnyShape<EIGHTS>;
    using B = AnyBlock<S::ROWS>;
    using B::p, B::work, B::places, B::memory, B::rows, B::queries, B::stride, B::lane, B::d;
    using B::warp, B::warps, B::team, B::teams, B::team_warps, B::rank, B::first_channel,
        B::end_channel;
    static constexpr int TOKENS = TILE_TOKENS, N = TOKENS / 16;
    float o[EIGHTS][S::OUT_TILES][4], max[EIGHTS][2], sum[EIGHTS][2], factor[EIGHTS][2];

    __device__ AnyAttention(const AnyAttentionArgs &p_, const AnyWork &work_,
                            const AnyPlaces &places_, uint8_t *memory_)
        : B(p_, work_, places_, memory_), o{}
    {
    }

    /* The lane's query rows are 8 t + row_of(h). */
    KVANT_INLINE int row_of(int h) const
    {
        return 2 * (lane & 3) + h;
    }

    KVANT_INLINE void begin()
    {
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int h = 0; h < 2; h++)
                max[t][h] = NEVER, sum[t][h] = 0;
    }

    KVANT_INLINE const uint8_t *page_of(bool values, int32_t entry) const
    {
        const PageSource &from = entry < 0 ? (values ? p.v_open : p.k_open) : values ? p.v : p.k;
        return from.base + (size_t)(uint32_t)(entry < 0 ? -1 - entry : entry) * from.block_stride +
               work.pair.kv_head * from.head_stride;
    }

    /* Prefetches the pages that the team needs next. */
    KVANT_INLINE void request(int32_t entry) const
    {
        if (entry < 0)
            return;
        for (uint32_t at = 128 * (32 * rank + lane); at < p.k.bytes; at += 128 * 32 * team_warps)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(page_of(false, entry) + at));
        for (uint32_t at = 128 * (32 * rank + lane); at < p.v.bytes; at += 128 * 32 * team_warps)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(page_of(true, entry) + at));
    }

    KVANT_INLINE __half *tile() const
    {
        return reinterpret_cast<__half *>(memory + places.tiles + team * places.tile_bytes);
    }

    KVANT_INLINE float *units(bool values) const
    {
        return reinterpret_cast<float *>(memory + places.units) + (2 * team + values) * TOKENS;
    }

    /* Decodes tokens first, first + 1, ... of a page, of which `valid` exist. */
    template <bool KEYS> KVANT_INLINE void decode(int32_t entry, int first, int valid) const
    {
        const DecodedTile to{ page_of(!KEYS, entry),
                              shared_address(tile()),
                              shared_address(units(!KEYS)),
                              shared_address(memory + places.scratch + warp * places.scratch_bytes),
                              stride,
                              d,
                              first,
                              valid,
                              first_channel,
                              end_channel,
                              rank,
                              team_warps,
                              lane,
                              work.pair.kv_head,
                              team };
        if (entry < 0)
            decode_open(to, KVANT_CUDA_F16);
        else
            decode_tile<KEYS, WITH>(
                KEYS ? p.keys : p.values,
                *reinterpret_cast<const AnyBook *>(memory + places.books[!KEYS]), to);
        wait_for_team(team, team_warps);
    }

    /* Multiplies keys. s: tokens 16 k + lane / 4 and + 8, and the lane's query rows. */
    KVANT_INLINE void multiply_keys(float (&s)[EIGHTS][N][4]) const
    {
        float odd[EIGHTS][N][4];
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int i = 0; i < 4; i++)
                    s[t][k][i] = odd[t][k][i] = 0;
        const __half *keys = tile() + (lane & 15) * stride + 8 * (lane >> 4);
        const __half *columns = queries + (lane & 7) * stride;
#pragma unroll 2
        for (int channel = first_channel; channel < end_channel; channel += 32) {
            uint32_t a[4], b[EIGHTS][4];
            const int part =
                8 * (lane >> 3 & (channel + 16 < end_channel
                                      ? 3
                                      : 1)); /* channels beyond the end are memory of other warps */
            unrolled_for (int t = 0; t < EIGHTS; t++)
                load_matrices<false>(b[t], columns + 8 * t * stride + channel + part);
            unrolled_for (int k = 0; k < N; k++) {
                load_matrices<false>(a, keys + 16 * k * stride + channel);
                unrolled_for (int t = 0; t < EIGHTS; t++)
                    mma(s[t][k], a, b[t][0], b[t][1]);
            }
            if (channel + 16 < end_channel)
                unrolled_for (int k = 0; k < N; k++) {
                    load_matrices<false>(a, keys + 16 * k * stride + channel + 16);
                    unrolled_for (int t = 0; t < EIGHTS; t++)
                        mma(odd[t][k], a, b[t][2], b[t][3]);
                }
        }
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int i = 0; i < 4; i++)
                    s[t][k][i] += odd[t][k][i];
    }

    /* Adds up the partial scores of the team's warps. All keys have been read. */
    KVANT_INLINE void add_scores(float (&s)[EIGHTS][N][4]) const
    {
        if (team_warps == 1)
            return wait_for_team(team, team_warps);
        float *shares = reinterpret_cast<float *>(memory + places.scores) +
                        team * team_warps * S::ROWS * TOKENS + lane;
        auto each = [&](int of, auto &&use) {
            unrolled_for (int t = 0; t < EIGHTS; t++)
                unrolled_for (int k = 0; k < N; k++)
                    unrolled_for (int i = 0; i < 4; i++)
                        use(shares[of * S::ROWS * TOKENS + ((t * N + k) * 4 + i) * 32], s[t][k][i]);
        };
        each(rank, [](float &there, float own) { there = own; });
        wait_for_team(team, team_warps);
        each(0, [](float there, float &own) { own = there; });
        rolled_for (int i = 1; i < team_warps; i++)
            each(i, [](float there, float &own) { own += there; });
    }

    /* Raises references if a weight would exceed its reference by more than SLACK. */
    KVANT_INLINE void raise(const float (&s)[EIGHTS][N][4])
    {
        float top[EIGHTS][2];
        bool fits = true;
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int h = 0; h < 2; h++) {
                top[t][h] = NEVER;
                unrolled_for (int k = 0; k < N; k++)
                    top[t][h] = fmaxf(top[t][h], fmaxf(s[t][k][h], s[t][k][h + 2]));
                fits &= top[t][h] <= max[t][h] + SLACK;
            }
        if (__all_sync(FULL, fits))
            return;
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int h = 0; h < 2; h++) {
                unrolled_for (int k = 4; k < 32; k *= 2)
                    top[t][h] = fmaxf(top[t][h], __shfl_xor_sync(FULL, top[t][h], k));
                const float raised = fmaxf(max[t][h], top[t][h]),
                            shrink = exp2_fast(max[t][h] - raised);
                max[t][h] = raised, sum[t][h] *= shrink;
                unrolled_for (int i = 0; i < S::OUT_TILES; i++)
                    o[t][i][h] *= shrink, o[t][i][h + 2] *= shrink;
            }
    }

    /* Adds the products of queries with the page's own centre to scores. */
    KVANT_INLINE void add_offsets(float (&s)[EIGHTS][N][4], int page) const
    {
        const float *from = offsets_of(p, work.pair, page);
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int h = 0; h < 2; h++) {
                const float own = page_offset(work.pair, from, 8 * t + row_of(h)) * p.scale_log2;
                unrolled_for (int k = 0; k < N; k++)
                    s[t][k][h] += own, s[t][k][h + 2] += own;
            }
    }

    /* Computes weights from scores, as an operand whose rows are tokens. The tile begins with token
     * `first` of the sequence. With `special`, scores change (mask, softcap, ALiBi), or tokens are
     * hidden. */
    KVANT_INLINE void weigh(float (&s)[EIGHTS][N][4], int first, bool special,
                            uint32_t (&w)[EIGHTS][N][2])
    {
        float inverse[N][2];
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int r = 0; r < 2; r++) {
                const int token = 16 * k + 8 * r + (lane >> 2),
                          bits = __float_as_int(units(true)[token]);
                const float key = units(false)[token], exponent = (float)((bits >> 23) - 127);
                inverse[k][r] = inverse_of(units(true)[token]);
                unrolled_for (int t = 0; t < EIGHTS; t++)
                    unrolled_for (int h = 0; h < 2; h++) {
                        float &x = s[t][k][2 * r + h];
                        x *= factor[t][h] * key;
                        if (special)
                            x = changed(p, rows, work.length, x, 8 * t + row_of(h), first + token);
                        x += exponent;
                    }
            }
        if (p.page_offsets)
            add_offsets(s, first / PAGE_TOKENS);
        raise(s);
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int r = 0; r < 2; r++) {
                    float e[2];
                    unrolled_for (int h = 0; h < 2; h++) {
                        e[h] = exp2_fast(s[t][k][2 * r + h] - max[t][h]);
                        sum[t][h] += e[h] * inverse[k][r];
                    }
                    w[t][k][r] = transpose8x8(pack_half2(e[0], e[1]));
                }
    }

    KVANT_INLINE void multiply_values(const uint32_t (&w)[EIGHTS][N][2])
    {
        const __half *values =
            tile() + ((lane & 7) + 8 * (lane >> 4)) * stride + 8 * (lane >> 3 & 1) + first_channel;
        unrolled_for (int i = 0; i < S::OUT_TILES; i += 2) {
            if (first_channel + 16 * i >= end_channel)
                break;
            const int second =
                first_channel + 16 * (i + 1) < end_channel ? 16 : 0; /* 0: its sums are not used */
            uint32_t a[N][2][4];
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int j = 0; j < 2; j++)
                    load_matrices<true>(a[k][j], values + 16 * k * stride + 16 * i + j * second);
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int j = 0; j < 2; j++)
                    unrolled_for (int t = 0; t < EIGHTS; t++)
                        mma(o[t][i + j], a[k][j], w[t][k][0], w[t][k][1]);
        }
    }

    /* Processes pages first to end - 1, whose keys have one transform. */
    KVANT_INLINE void run(int first_page, int end_page)
    {
        const int32_t *table = p.table + work.pair.b * p.table_stride;
        const Seen seen = seen_by_all(p, work.pair, work.first_position);
        const bool changes = p.softcap_log2 > 0 || p.mask || p.max_bias > 0;
        auto entry_of = [&](int page) {
            return page < end_page ? __ldg(table + page) : KVANT_CUDA_NO_BLOCK;
        };
        int page = first_page + team;
        int32_t entry = entry_of(page), next = entry_of(page + teams);
        rolled_for (; page < end_page; page += teams) {
            const int begin = page * PAGE_TOKENS,
                      tokens = entry == KVANT_CUDA_NO_BLOCK ? 0 : work.length - begin;
            request(next);
            if (p.page_offsets && lane == 0)
                prefetch_line(offsets_of(p, work.pair, page), 0);
            rolled_for (int first = 0; first < PAGE_TOKENS && first < tokens; first += TOKENS) {
                const int at = begin + first, valid = min(tokens - first, TOKENS);
                float s[EIGHTS][N][4];
                uint32_t w[EIGHTS][N][2];
                wait_for_team(team, team_warps); /* the values before these have been read */
                decode<true>(entry, first, valid);
                multiply_keys(s);
                add_scores(s);
                decode<false>(entry, first, valid);
                weigh(s, at,
                      changes || valid < TOKENS || at < seen.from || at + TOKENS - 1 > seen.to, w);
                multiply_values(w);
            }
            entry = next;
            next = entry_of(page + 2 * teams);
        }
    }

    /* Processes all pages. All teams take the pages of one transform before the pages of the next.
     * In between, references refer to complete scores. */
    KVANT_INLINE void run()
    {
        rolled_for (int first = work.first_page, end; first < work.end_page; first = end) {
            end = end_of_run(p, work.pair.b, first, work.end_page, lane);
            __syncthreads(); /* loading rows overwrites tiles that are in use */
            B::load_queries(matrix_of(p, work.pair.b, first), [] {});
            __syncthreads();
            unrolled_for (int t = 0; t < EIGHTS; t++)
                unrolled_for (int h = 0; h < 2; h++)
                    factor[t][h] = rows.factor[8 * t + row_of(h)],
                    max[t][h] -= rows.bias[8 * t + row_of(h)];
            run(first, end);
            unrolled_for (int t = 0; t < EIGHTS; t++)
                unrolled_for (int h = 0; h < 2; h++)
                    max[t][h] += rows.bias[8 * t + row_of(h)];
        }
    }

    /* Adds up the teams' sums: first to the first team, and from there to the results, row by
     * row. */
    KVANT_INLINE void add_warps()
    {
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int h = 0; h < 2; h++) {
                unrolled_for (int k = 4; k < 32; k *= 2)
                    sum[t][h] += __shfl_xor_sync(FULL, sum[t][h], k);
                if (rank == 0 && lane < 4) {
                    rows.team_max[team][8 * t + row_of(h)] = max[t][h];
                    rows.team_sum[team][8 * t + row_of(h)] = sum[t][h];
                }
            }
        __syncthreads(); /* tiles are not read any more */
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int h = 0; h < 2; h++) {
                const int row = 8 * t + row_of(h);
                float top = NEVER, total = 0;
                for (int i = 0; i < teams; i++)
                    top = fmaxf(top, rows.team_max[i][row]);
                for (int i = 0; i < teams; i++)
                    total += rows.team_sum[i][row] * exp2_fast(rows.team_max[i][row] - top);
                if (warp == 0 && lane < 4)
                    rows.max[row] = top, rows.sum[row] = total;
                const float shrink = exp2_fast(max[t][h] - top);
                unrolled_for (int i = 0; i < S::OUT_TILES; i++)
                    o[t][i][h] *= shrink, o[t][i][h + 2] *= shrink;
            }
        rolled_for (int half = teams / 2; half > 0; half /= 2) {
            if (team >= half && team < 2 * half)
                each_sum(team - half, [](float &there, float own) { there = own; });
            __syncthreads();
            if (team < half)
                each_sum(team, [](float there, float &own) { own += there; });
            __syncthreads();
        }
        if (team == 0)
            unrolled_for (int t = 0; t < EIGHTS; t++)
                unrolled_for (int i = 0; i < S::OUT_TILES; i++) {
                    const int channel = first_channel + 16 * i + (lane >> 2);
                    if (channel < end_channel)
                        unrolled_for (int k = 0; k < 4; k++)
                            B::results()[(8 * t + row_of(k & 1)) * d + channel + 8 * (k >> 1)] =
                                o[t][i][k];
                }
        __syncthreads();
    }

    /* use(index n in shared memory, the lane's own sum) */
    template <class F> KVANT_INLINE void each_sum(int n, F &&use)
    {
        float *there = B::results() + n * S::ROWS * d + S::ROWS * first_channel + lane;
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int i = 0; i < S::OUT_TILES; i++)
                if (first_channel + 16 * i < end_channel)
                    unrolled_for (int k = 0; k < 4; k++)
                        use(there[((i * EIGHTS + t) * 4 + k) * 32], o[t][i][k]);
    }

    KVANT_INLINE void finish()
    {
        add_warps();
        B::end();
    }
};

template <int EIGHTS, unsigned WITH>
__global__ void __launch_bounds__(MOST_WARPS * 32, AnyShape<EIGHTS>::BLOCKS)
    attention_any_kernel(const __grid_constant__ AnyAttentionArgs p)
{
    using S = AnyShape<EIGHTS>;
    extern __shared__ __align__(16) uint8_t memory[];
    const AnyWork work = find_any_work<S::ROWS>(p);
    if (work.pair.n_columns == 0)
        return;
    const AnyPlaces places(p.keys, p.values, S::ROWS, (int)blockDim.x / 32);
    reinterpret_cast<AnyBook *>(memory + places.books[0])->load(p.keys);
    reinterpret_cast<AnyBook *>(memory + places.books[1])->load(p.values);
    AnyAttention<EIGHTS, WITH> attention(p, work, places, memory);
    attention.begin();
    attention.run();
    attention.finish();
}

template <unsigned WITH> const void *any_kernel(bool many)
{
    return many ? (const void *)attention_any_kernel<2, WITH>
                : (const void *)attention_any_kernel<1, WITH>;
}

} // namespace kvant
