/* direct.cuh - attention that makes operands of mma.m16n8k16 from codes, in registers. It serves
 * tiers of channels (direct_tiers.cuh), with head_dim 64 or 128 and equal tiers of keys and values.
 *
 * As in attention.cuh, a thread block processes up to 8 query rows of one kv head, and all pages
 * that they see or one of several equal parts of them. Each warp has its own pages in shared
 * memory. Keys are copied while the values before them are multiplied, and values while keys are
 * multiplied. */
#pragma once

#include "../any/block.cuh"
#include "direct.h"
#include "direct_tiers.cuh"

#include "../attention/prefetch.cuh"
#include "../attention/softmax.cuh"

namespace kvant
{

/* A page of a warp. Neighbouring warps process neighbouring pages. */
struct DirectPage {
    int at;              /* index in the sequence */
    int32_t entry, next; /* table entries of the page, and of the warp's next page */
};

__host__ __device__ inline int stage_bytes(uint32_t page_bytes)
{
    return (int)(page_bytes + 15) / 16 * 16;
}

/* x[k] of an array in registers, for an index that is no constant. */
template <class T, int N> KVANT_INLINE T element(const T (&x)[N], int k)
{
    T found = x[0];
    unrolled_for (int i = 1; i < N; i++)
        found = i == k ? x[i] : found;
    return found;
}

template <class T, int N> KVANT_INLINE void put_element(T (&x)[N], int k, const T &own)
{
    unrolled_for (int i = 0; i < N; i++)
        x[i] = i == k ? own : x[i];
}

template <class T, int N, int M> KVANT_INLINE T (&flat(T (&x)[N][M]))[N * M]
{
    return reinterpret_cast<T(&)[N * M]>(x);
}

/* Shared memory of a block: AnyRows, tables, queries, results; then, for each warp, its sums and
 * its order of channels, keys and values. F: TieredCodes. */
template <class F>
__host__ __device__ AnyPlaces direct_places(uint32_t k_bytes, uint32_t v_bytes, int warps)
{
    AnyPlaces at{};
    at.books[0] = AnyPlaces::round_up((int)sizeof(AnyRows));
    at.queries = at.books[0] + F::BOOK_BYTES;
    at.tiles = AnyPlaces::round_up(at.queries + DIRECT_ROWS * AnyPlaces::stride(F::D) * 2);
    at.tile_bytes = F::D * (int)sizeof(float);
    at.scratch = at.tiles + F::SUM_BYTES;
    at.scratch_bytes = F::EXTRA_BYTES + stage_bytes(k_bytes) + stage_bytes(v_bytes);
    at.end = at.scratch + warps * at.scratch_bytes;
    return at;
}

template <class F> struct Direct : AnyBlock<DIRECT_ROWS> {
    using B = AnyBlock<DIRECT_ROWS>;
    static constexpr int D = F::D, N = F::TILES;
    F tiers;
    DirectLane at;
    DirectPage page;
    float max[2], sum[2], factor[2];

    KVANT_INLINE Direct(const AnyAttentionArgs &p_, const AnyWork &work_, const AnyPlaces &places_,
                        uint8_t *memory_)
        : B(p_, work_, places_, memory_),
          tiers(p_.keys.general, p_.values.general, memory_ + places_.books[0], own(), B::lane),
          at(B::lane)
    {
    }

    KVANT_INLINE uint8_t *own() const
    {
        return B::memory + B::places.scratch + B::warp * B::places.scratch_bytes;
    }

    /* The memory for a page of a role. */
    KVANT_INLINE uint8_t *stage(bool values) const
    {
        return own() + F::EXTRA_BYTES + (values ? stage_bytes(B::p.k.bytes) : 0);
    }

    KVANT_INLINE const uint8_t *page_of(bool values, int32_t entry) const
    {
        const PageSource &from = entry < 0 ? (values ? B::p.v_open : B::p.k_open)
                                 : values  ? B::p.v
                                           : B::p.k;
        return from.base + (size_t)(uint32_t)(entry < 0 ? -1 - entry : entry) * from.block_stride +
               B::work.pair.kv_head * from.head_stride;
    }

    KVANT_INLINE int32_t entry_at(int place) const
    {
        return place < B::work.end_page
                   ? __ldg(B::p.table + B::work.pair.b * B::p.table_stride + place)
                   : KVANT_CUDA_NO_BLOCK;
    }

    KVANT_INLINE DirectPage following() const
    {
        return DirectPage{ page.at + B::warps, page.next, entry_at(page.at + 2 * B::warps) };
    }

    /* The number of a page's tokens that exist. */
    KVANT_INLINE int tokens_of(const DirectPage &of) const
    {
        return of.entry == KVANT_CUDA_NO_BLOCK
                   ? 0
                   : min(B::work.length - PAGE_TOKENS * of.at, PAGE_TOKENS);
    }

    KVANT_INLINE void request(bool values, const DirectPage &of) const
    {
        __syncwarp();
        if (tokens_of(of) > 0 && of.entry >= 0) {
            const uint32_t to = shared_address(stage(values)),
                           bytes = (values ? B::p.v : B::p.k).bytes;
            const uint8_t *from = page_of(values, of.entry);
#pragma unroll 4
            for (uint32_t byte = 16 * B::lane; byte < bytes; byte += 16 * 32)
                copy_or_clear(to + byte, from + byte, true);
        }
        end_copies();
    }

    /* Starts copying the warp's first page. */
    KVANT_INLINE void begin()
    {
        const int first = B::work.first_page + B::warp;
        page = DirectPage{ first, entry_at(first), entry_at(first + B::warps) };
        request(false, page);
        request(true, page);
    }

    /* Waits for the older of two copies. */
    KVANT_INLINE void wait()
    {
        wait_for_copies<1>();
        __syncwarp();
    }

    /* The same as AnyAttention::raise. */
    KVANT_INLINE void raise(const float (&s)[N][4])
    {
        float top[2];
        bool fits = true;
        unrolled_for (int h = 0; h < 2; h++) {
            top[h] = NEVER;
            unrolled_for (int k = 0; k < N; k++)
                top[h] = fmaxf(top[h], fmaxf(s[k][h], s[k][h + 2]));
            fits &= top[h] <= max[h] + SLACK;
        }
        if (__all_sync(FULL, fits))
            return;
        float shrink[2];
        unrolled_for (int h = 0; h < 2; h++) {
            unrolled_for (int k = 4; k < 32; k *= 2)
                top[h] = fmaxf(top[h], __shfl_xor_sync(FULL, top[h], k));
            const float raised = fmaxf(max[h], top[h]);
            shrink[h] = exp2_fast(max[h] - raised);
            max[h] = raised, sum[h] *= shrink[h];
        }
        tiers.shrink(shrink);
    }

    /* A power of two above all numbers of a row of an open page, because weights divided by the
     * unit have to stay within fp16. Computed by four lanes. */
    KVANT_INLINE float open_unit(const uint8_t *open, int token) const
    {
        const uint32_t *row = reinterpret_cast<const uint32_t *>(open) + token * (D / 2);
        float largest = 0;
#pragma unroll 4
        for (int i = at.pair; i < D / 2; i += 4) {
            const uint32_t x = __ldg(row + i);
            const float2 numbers = __half22float2(*reinterpret_cast<const __half2 *>(&x));
            largest = fmaxf(largest, fmaxf(fabsf(numbers.x), fabsf(numbers.y)));
        }
        unrolled_for (int k = 1; k < 4; k *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, k));
        return fmaxf(power_above(largest), 0x1p-7f);
    }

    /* The units of the values of tokens 16 k + 8 r + row. Rare work is done in loops, here and
     * below, because the code per page has to be short. */
    KVANT_INLINE void find_units(int valid, float (&units)[N][2]) const
    {
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int r = 0; r < 2; r++) {
                float largest = 0;
                unrolled_for (int i = 0; i < 2; i++)
                    largest =
                        fmaxf(largest, tiers.value_scale(stage(true), i, 16 * k + 8 * r + at.row));
                units[k][r] = 16 * k + 8 * r + at.row < valid
                                  ? fmaxf(power_above(largest), LEAST_UNIT)
                                  : LEAST_UNIT;
            }
        if (page.entry < 0)
            rolled_for (int n = 0; n < 2 * N; n++)
                put_element(flat(units), n, open_unit(page_of(true, page.entry), 8 * n + at.row));
    }

    /* Applies the problem's changes to scores: softcap, mask, ALiBi. first: the page's first token
     * in the sequence. */
    KVANT_INLINE void change(float (&s)[N][4], int first) const
    {
        rolled_for (int n = 0; n < 4 * N; n++) {
            const int token = first + 8 * (n >> 1) + at.row, row = 2 * at.pair + (n & 1);
            put_element(
                flat(s), n,
                changed_score(B::p, B::rows, B::work.length, element(flat(s), n), row, token));
        }
    }

    /* Computes weights from scores, divided by the units of their values, as operands. */
    KVANT_INLINE void weigh(float (&s)[N][4], int first, int valid, bool special,
                            uint32_t (&w)[2][N][2])
    {
        float units[N][2];
        find_units(valid, units);
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int i = 0; i < 4; i++)
                s[k][i] *= factor[i % 2];
        if (special)
            change(s, first);
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int i = 0; i < 4; i++)
                s[k][i] += (float)((__float_as_int(units[k][i / 2]) >> 23) - 127);
        raise(s);
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int r = 0; r < 2; r++) {
                const int token = 16 * k + 8 * r + at.row;
                float e[2];
                unrolled_for (int h = 0; h < 2; h++) {
                    e[h] = exp2_fast(s[k][2 * r + h] - max[h]);
                    sum[h] += e[h] *= inverse_of(units[k][r]);
                }
                unrolled_for (int i = 0; i < 2; i++) {
                    const float scale = page.entry < 0  ? 1
                                        : token < valid ? tiers.value_scale(stage(true), i, token)
                                                        : 0;
                    w[i][k][r] = transpose8x8(pack_half2(e[0] * scale, e[1] * scale));
                }
            }
    }

    /* Computes scores of fp16 rows. */
    KVANT_INLINE void open_keys(const uint8_t *open, float (&s)[N][4]) const
    {
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int i = 0; i < 4; i++)
                s[k][i] = 0;
        rolled_for (int c = 0; c < D; c += 16) {
            uint32_t b[2];
            unrolled_for (int i = 0; i < 2; i++)
                b[i] = *reinterpret_cast<const uint32_t *>(B::queries + at.row * B::stride + c +
                                                           2 * at.pair + 8 * i);
            unrolled_for (int k = 0; k < N; k++) {
                uint32_t a[4];
                unrolled_for (int q = 0; q < 4; q++)
                    a[q] = __ldg(reinterpret_cast<const uint32_t *>(
                        reinterpret_cast<const __half *>(open) +
                        (16 * k + at.row + 8 * (q & 1)) * D + c + 2 * at.pair + 8 * (q >> 1)));
                mma(s[k], a, b[0], b[1]);
            }
        }
    }

    /* Adds weighted fp16 rows to sums. Rows that do not exist count as 0. */
    KVANT_INLINE void open_values(const uint8_t *open, int valid, const uint32_t (&w)[2][N][2])
    {
        const uint16_t *rows_here = reinterpret_cast<const uint16_t *>(open);
        const auto number = [&](int token, int channel) -> uint32_t {
            return token < valid ? __ldg(rows_here + token * D + channel) : 0;
        };
        rolled_for (int i = 0; i < D / 16; i++) {
            float x[4] = {};
            rolled_for (int k = 0; k < N; k++) {
                uint32_t a[4];
                unrolled_for (int q = 0; q < 4; q++) {
                    const int token = 16 * k + 2 * at.pair + 8 * (q >> 1),
                              channel = 16 * i + at.row + 8 * (q & 1);
                    a[q] = number(token, channel) | number(token + 1, channel) << 16;
                }
                uint32_t b[2];
                unrolled_for (int j = 0; j < N; j++)
                    if (j == k)
                        b[0] = w[0][j][0], b[1] = w[0][j][1];
                mma(x, a, b[0], b[1]);
            }
            tiers.add(i, x);
        }
    }

    KVANT_INLINE void take(const DirectPage &next, const Seen &seen, bool changes)
    {
        const int first = PAGE_TOKENS * page.at, valid = tokens_of(page);
        float s[N][4];
        uint32_t w[2][N][2];
        wait();
        if (valid > 0)
            page.entry < 0 ? open_keys(page_of(false, page.entry), s)
                           : tiers.keys(stage(false), B::queries, B::stride, s);
        request(false, next);
        wait();
        if (valid > 0) {
            weigh(s, first, valid,
                  changes || valid < PAGE_TOKENS || first < seen.from ||
                      first + PAGE_TOKENS - 1 > seen.to,
                  w);
            if (page.entry < 0)
                open_values(page_of(true, page.entry), valid, w);
            else
                tiers.values(stage(true), w);
        }
        request(true, next);
    }

    KVANT_INLINE void run()
    {
        const Seen seen = seen_by_all(B::p, B::work.pair, B::work.first_position);
        const bool changes = B::p.softcap_log2 > 0 || B::p.mask || B::p.max_bias > 0;
        unrolled_for (int h = 0; h < 2; h++)
            max[h] = NEVER, sum[h] = 0, factor[h] = B::rows.factor[2 * at.pair + h];
#pragma unroll 1
        while (page.at < B::work.end_page) {
            const DirectPage next = following();
            take(next, seen, changes);
            page = next;
        }
        wait_for_copies<0>();
    }

    /* Adds the sums of the warps, [channel][row] each, to the results. */
    KVANT_INLINE void add_warps()
    {
        unrolled_for (int h = 0; h < 2; h++) {
            unrolled_for (int k = 4; k < 32; k *= 2)
                sum[h] += __shfl_xor_sync(FULL, sum[h], k);
            if (lane < 4)
                B::rows.team_max[B::warp][2 * at.pair + h] = max[h],
                                                        B::rows.team_sum[B::warp][2 * at.pair + h] =
                                                            sum[h];
        }
        __syncthreads();
        if (threadIdx.x < DIRECT_ROWS) {
            const int row = (int)threadIdx.x;
            float top = NEVER, total = 0;
            for (int i = 0; i < B::warps; i++)
                top = fmaxf(top, B::rows.team_max[i][row]);
            for (int i = 0; i < B::warps; i++) {
                const float shrink = exp2_fast(B::rows.team_max[i][row] - top);
                total += B::rows.team_sum[i][row] * shrink;
                B::rows.team_max[i][row] = shrink;
            }
            B::rows.max[row] = top, B::rows.sum[row] = total;
        }
        __syncthreads();
        rolled_for (int i = threadIdx.x; i < D * DIRECT_ROWS; i += blockDim.x) {
            const int row = i % DIRECT_ROWS, channel = i / DIRECT_ROWS;
            const float *from = reinterpret_cast<const float *>(B::memory + B::places.scratch) + i;
            float x = 0;
#pragma unroll 4
            for (int n = 0; n < B::warps; n++)
                x += from[n * (B::places.scratch_bytes / 4)] * B::rows.team_max[n][row];
            B::results()[row * D + channel] = x;
        }
        __syncthreads();
    }

    KVANT_INLINE void finish()
    {
        add_warps();
        B::end();
    }
};

template <class F>
__global__ void __launch_bounds__(DIRECT_WARPS * 32, 2)
    direct_kernel(const __grid_constant__ AnyAttentionArgs p)
{
    extern __shared__ __align__(16) uint8_t memory[];
    prefetch<F::D>(p);
    const AnyPlaces places = direct_places<F>(p.k.bytes, p.v.bytes, (int)blockDim.x / 32);
    F::load_books(p.keys.general, p.values.general, memory + places.books[0], threadIdx.x,
                  blockDim.x);
    const AnyWork work = find_any_work<DIRECT_ROWS>(p);
    if (work.pair.n_columns == 0)
        return;
    Direct<F> attention(p, work, places, memory);
    attention.load_queries(0, [&] { attention.begin(); });
    __syncthreads();
    attention.run();
    attention.finish();
}

} // namespace kvant
