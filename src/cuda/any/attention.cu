/* attention.cu - attention of any head_dim over pages of any pair of codecs.
 *
 * A thread block takes up to 8 or 16 query rows of one kv head and all pages that they see, or one of several
 * equal parts of them; the block that ends last adds the parts in order. A team of 1, 2 or 4 warps has pages of its
 * own, and waits for no other until the end; each of its warps has up to 128 channels. The team decodes 32 tokens at
 * a time to fp16 in shared memory (a tile), keys first, then values in the same place, and multiplies them by
 * mma.m16n8k16. Tokens, then channels, are the rows of the product, query rows its columns, as in decode kernels.
 *
 * Every token's numbers stand in a unit. Weights are 2^(score + log2(unit of the values) - reference), as in
 * softmax.cuh. */
#include "any.h"
#include "decode_tile.cuh"

#include "../attention/combine.cuh"
#include "../attention/scores.cuh"
#include "../attention/softmax.cuh"
#include "../checks.h"
#include "../launch.h"

#include <algorithm>
#include <climits>

namespace kvant
{

constexpr int MOST_WARPS = 8;

struct AnyAttentionArgs : AttentionArgs {
    kvant_cuda_codec keys, values;
    int tiles, splits; /* as in TileArgs */
};

constexpr int WARP_CHANNELS = 128;

/* EIGHTS: of query rows. */
template <int EIGHTS> struct AnyShape {
    static constexpr int ROWS = 8 * EIGHTS, OUT_TILES = WARP_CHANNELS / 16, BLOCKS = 2; /* of a multiprocessor */
};

/* Warps of a team. */
__host__ __device__ constexpr int team_of(int d)
{
    return d <= WARP_CHANNELS ? 1 : d <= 2 * WARP_CHANNELS ? 2 : 4;
}

struct AnyRows {
    static constexpr int ROWS = 16;
    size_t mask_row[ROWS];
    float factor[ROWS], slope[ROWS], max[ROWS], sum[ROWS];
    float team_max[MOST_WARPS][ROWS], team_sum[MOST_WARPS][ROWS];
    int position[ROWS];
    uint32_t before; /* parts that ended before this one */
};

/* Shared memory of a thread block, in bytes from its beginning: AnyRows, tables, queries; for each team a tile and the
 * units of keys and values; for each warp its share of scores, and scratch. Results take the place of tiles in the end. */
struct AnyPlaces {
    int books[2], queries, tiles, tile_bytes, units, scores, scratch, scratch_bytes, end;

    __host__ __device__ static int round_up(int n)
    {
        return (n + 15) / 16 * 16;
    }
    __host__ __device__ static int stride(int d)
    {
        return d + 8;
    }
    __host__ __device__ AnyPlaces(const kvant_cuda_codec &k, const kvant_cuda_codec &v, int rows, int warps)
    {
        const int d = (int)k.params.head_dim, team = team_of(d), teams = warps / team;
        books[0] = round_up((int)sizeof(AnyRows));
        books[1] = books[0] + AnyBook::bytes(k);
        queries = books[1] + AnyBook::bytes(v);
        tiles = round_up(queries + rows * stride(d) * 2);
        tile_bytes = TILE_TOKENS * stride(d) * 2;
        units = tiles + teams * tile_bytes;
        scores = units + teams * 2 * TILE_TOKENS * 4;
        scratch = scores + (team > 1 ? warps * rows * TILE_TOKENS * 4 : 0);
        scratch_bytes = round_up(any_scratch(k) > any_scratch(v) ? any_scratch(k) : any_scratch(v));
        end = scratch + warps * scratch_bytes;
    }
};

struct AnyWork {
    Pair pair;
    int first_position, length, first_page, end_page, item, part;
};

template <int ROWS> __device__ AnyWork find_any_work(const AnyAttentionArgs &p)
{
    const Lengths<true, ROWS> lengths{ p };
    AnyWork w;
    int i = blockIdx.x;
    w.part = i % p.splits, i /= p.splits, w.item = i;
    const int tile = i % p.tiles;
    i /= p.tiles;
    w.pair.kv_head = i % p.kv_heads, w.pair.b = i / p.kv_heads;
    w.pair.first_column = tile * ROWS;
    w.pair.n_columns = max(min(lengths.queries(w.pair.b) * p.heads_a_kv - tile * ROWS, ROWS), 0);
    w.length = lengths.length(w.pair.b);
    w.first_position = lengths.first_position(w.pair.b);
    const int last = w.first_position + column_of<true>(p, w.pair, max(w.pair.n_columns - 1, 0)).token,
              end = p.causal ? min(max(last + 1, 0), w.length) : w.length, first = lengths.first_page(w.pair.b),
              pages = max((end + PAGE_TOKENS - 1) / PAGE_TOKENS - first, 0);
    w.first_page = first + (int)((int64_t)pages * w.part / p.splits);
    w.end_page = first + (int)((int64_t)pages * (w.part + 1) / p.splits);
    return w;
}

/* The score, in binary, of a row and a token of the sequence. Rare, and not inlined: it would cost registers. */
__device__ __noinline__ float changed(const AnyAttentionArgs &p, const AnyRows &rows, int length, float x, int row, int token)
{
    if (p.softcap_log2 > 0)
        x = soften(x, p.softcap_log2);
    const int position = rows.position[row];
    if (token >= length || (p.causal && token > position) || position - token >= p.window)
        return -INFINITY;
    if (p.mask)
        return x + rows.slope[row] * __half2float(__ushort_as_half(__ldg(p.mask + rows.mask_row[row] + token)));
    return p.max_bias > 0 ? x + rows.slope[row] * (float)(token - position) : x;
}

template <int EIGHTS, Decoders WITH> struct AnyAttention {
    using S = AnyShape<EIGHTS>;
    static constexpr int TOKENS = TILE_TOKENS, N = TOKENS / 16;
    const AnyAttentionArgs &p;
    const AnyWork &work;
    const AnyPlaces &places;
    uint8_t *memory;
    AnyRows &rows;
    __half *queries;
    int d, stride, lane, warp, warps, team_warps, team, teams, rank; /* rank: of the warp in its team */
    int first_channel, end_channel;                                  /* of the warp */
    float o[EIGHTS][S::OUT_TILES][4], max[EIGHTS][2], sum[EIGHTS][2], factor[EIGHTS][2];

    __device__ AnyAttention(const AnyAttentionArgs &p_, const AnyWork &work_, const AnyPlaces &places_, uint8_t *memory_)
        : p(p_), work(work_), places(places_), memory(memory_), rows(*reinterpret_cast<AnyRows *>(memory_)),
          queries(reinterpret_cast<__half *>(memory_ + places_.queries)), d((int)p_.keys.params.head_dim),
          stride(AnyPlaces::stride(d)), lane(threadIdx.x & 31), warp(__shfl_sync(FULL, threadIdx.x >> 5, 0)),
          warps(blockDim.x >> 5), team_warps(team_of(d)), team(warp / team_warps), teams(warps / team_warps),
          rank(warp % team_warps), o{}
    {
        const int chunks = (d + 63) / 64, own = (chunks + team_warps - 1) / team_warps;
        first_channel = min(64 * own * rank, d), end_channel = min(first_channel + 64 * own, d);
    }

    /* Loops, here and at the end, instead of rows in registers: a block begins with a cold instruction cache. */
    template <class F> KVANT_INLINE void each_channel(F &&use) const
    {
#pragma unroll 4
        for (int channel = lane; channel < d; channel += 32)
            use(channel);
    }

    /* The Hadamard rotation of a row in shared memory, without its signs (rotate.cuh). */
    KVANT_INLINE void turn(float *row, const kvant_cuda_wide_rotation &rotation) const
    {
#pragma unroll 1
        for (int distance = 1; distance < (int)rotation.block; distance *= 2) {
            __syncwarp();
#pragma unroll 2
            for (int i = lane; i < d / 2; i += 32) {
                float *x = row + 2 * (i & -distance) + (i & (distance - 1)), a = x[0], b = x[distance];
                x[0] = a + b, x[distance] = a - b;
            }
        }
        __syncwarp();
        each_channel([&](int channel) { row[channel] *= rotation.scale; });
    }

    KVANT_INLINE static float signed_by(const kvant_cuda_wide_rotation &rotation, float x, int channel)
    {
        return rotation.block && rotation.signs[channel / 32] >> channel % 32 & 1 ? -x : x;
    }

    /* As load_queries of tiles.cuh. */
    KVANT_INLINE void load_queries() const
    {
        const kvant_cuda_wide_rotation &rotation = p.keys.any.rotation;
        float *row = reinterpret_cast<float *>(memory + places.tiles + warp * (places.tile_bytes / team_warps));
#pragma unroll 1
        for (int n = warp; n < S::ROWS; n += warps) {
            const Column column = column_of<true>(p, work.pair, min(n, work.pair.n_columns - 1));
            const QueryRow at = query_row(p, work.pair.b, column.token);
            each_channel([&](int channel) {
                float x = n < work.pair.n_columns ? load_number(p.q, at.q + column.head * p.q_head_stride + channel, p.type) : 0;
                x *= p.k_scale ? p.k_scale[work.pair.kv_head * d + channel] : 1;
                row[channel] = signed_by(rotation, x, channel);
            });
            if (rotation.block)
                turn(row, rotation);
            float largest = 0;
            each_channel([&](int channel) { largest = fmaxf(largest, fabsf(row[channel])); });
            const float unit = power_above(largest_of(largest)), inverse = inverse_of(unit);
            each_channel([&](int channel) { queries[n * stride + channel] = __float2half_rn(row[channel] * inverse); });
            if (lane == 0) {
                rows.factor[n] = unit * p.scale_log2;
                rows.position[n] = work.first_position + column.token;
                rows.slope[n] = slope_of(p, column.head);
                rows.mask_row[n] = at.row * p.mask_token_stride;
            }
        }
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
                max[t][h] = NEVER, sum[t][h] = 0, factor[t][h] = rows.factor[8 * t + row_of(h)];
    }

    KVANT_INLINE const uint8_t *page_of(bool values, int32_t entry) const
    {
        const PageSource &from = entry < 0 ? (values ? p.v_open : p.k_open) : values ? p.v : p.k;
        return from.base + (size_t)(uint32_t)(entry < 0 ? -1 - entry : entry) * from.block_stride +
               work.pair.kv_head * from.head_stride;
    }

    /* Pages that the team needs next. */
    KVANT_INLINE void ask_for(int32_t entry) const
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

    /* Tokens first, first + 1, ... of a page, of which `valid` are there. */
    template <bool KEYS> KVANT_INLINE void decode(int32_t entry, int first, int valid) const
    {
        const DecodedTile to{ page_of(!KEYS, entry), tile(), units(!KEYS), memory + places.scratch + warp * places.scratch_bytes,
                              stride, d, first, valid, first_channel, end_channel, rank, team_warps, lane, work.pair.kv_head, team };
        if (entry < 0)
            decode_open(to);
        else
            decode_tile<KEYS, WITH>(KEYS ? p.keys : p.values, *reinterpret_cast<const AnyBook *>(memory + places.books[!KEYS]), to);
        wait_for_team(team, team_warps);
    }

    /* s: tokens 16 k + lane / 4 and + 8, and the lane's query rows. */
    KVANT_INLINE void multiply_keys(float (&s)[EIGHTS][N][4]) const
    {
        float odd[EIGHTS][N][4];
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int i = 0; i < 4; i++)
                    s[t][k][i] = odd[t][k][i] = 0;
        const __half *keys = tile() + (lane & 15) * stride + 8 * (lane >> 4);
        const __half *columns = queries + (lane & 7) * stride + 8 * (lane >> 3);
#pragma unroll 2
        for (int channel = first_channel; channel < end_channel; channel += 32) {
            uint32_t a[4], b[EIGHTS][4];
            unrolled_for (int t = 0; t < EIGHTS; t++)
                load_matrices<false>(b[t], columns + 8 * t * stride + channel);
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

    /* Adds the shares of the team's warps. Keys have been read. */
    KVANT_INLINE void add_scores(float (&s)[EIGHTS][N][4]) const
    {
        if (team_warps == 1)
            return wait_for_team(team, team_warps);
        float *shares = reinterpret_cast<float *>(memory + places.scores) + team * team_warps * S::ROWS * TOKENS + lane;
        auto each = [&](int of, auto &&use) {
            unrolled_for (int t = 0; t < EIGHTS; t++)
                unrolled_for (int k = 0; k < N; k++)
                    unrolled_for (int i = 0; i < 4; i++)
                        use(shares[of * S::ROWS * TOKENS + ((t * N + k) * 4 + i) * 32], s[t][k][i]);
        };
        each(rank, [](float &there, float own) { there = own; });
        wait_for_team(team, team_warps);
        each(0, [](float there, float &own) { own = there; });
#pragma unroll 1
        for (int i = 1; i < team_warps; i++)
            each(i, [](float there, float &own) { own += there; });
    }

    /* Raises references that weights would exceed by more than SLACK. */
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
                const float raised = fmaxf(max[t][h], top[t][h]), shrink = exp2_fast(max[t][h] - raised);
                max[t][h] = raised, sum[t][h] *= shrink;
                unrolled_for (int i = 0; i < S::OUT_TILES; i++)
                    o[t][i][h] *= shrink, o[t][i][h + 2] *= shrink;
            }
    }

    /* Scores to weights as an operand: tokens as rows. first: the tile's first token in the sequence. special:
     * scores change, or tokens are hidden. */
    KVANT_INLINE void weigh(float (&s)[EIGHTS][N][4], int first, bool special, uint32_t (&w)[EIGHTS][N][2])
    {
        float inverse[N][2];
        unrolled_for (int k = 0; k < N; k++)
            unrolled_for (int r = 0; r < 2; r++) {
                const int token = 16 * k + 8 * r + (lane >> 2), bits = __float_as_int(units(true)[token]);
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
        const __half *values = tile() + ((lane & 7) + 8 * (lane >> 4)) * stride + 8 * (lane >> 3 & 1) + first_channel;
        unrolled_for (int i = 0; i < S::OUT_TILES; i += 2) { /* a tile too many is read, but not used */
            if (first_channel + 16 * i >= end_channel)
                break;
            uint32_t a[N][2][4];
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int j = 0; j < 2; j++)
                    load_matrices<true>(a[k][j], values + 16 * k * stride + 16 * (i + j));
            unrolled_for (int k = 0; k < N; k++)
                unrolled_for (int j = 0; j < 2; j++)
                    unrolled_for (int t = 0; t < EIGHTS; t++)
                        mma(o[t][i + j], a[k][j], w[t][k][0], w[t][k][1]);
        }
    }

    KVANT_INLINE void run()
    {
        const int32_t *table = p.table + work.pair.b * p.table_stride;
        const Seen seen = seen_by_all(p, work.pair, work.first_position);
        const bool changes = p.softcap_log2 > 0 || p.mask || p.max_bias > 0;
        auto entry_of = [&](int page) { return page < work.end_page ? __ldg(table + page) : KVANT_CUDA_NO_BLOCK; };
        int page = work.first_page + team;
        int32_t entry = entry_of(page), next = entry_of(page + teams);
#pragma unroll 1
        for (; page < work.end_page; page += teams) {
            const int begin = page * PAGE_TOKENS, tokens = entry == KVANT_CUDA_NO_BLOCK ? 0 : work.length - begin;
            ask_for(next);
#pragma unroll 1
            for (int first = 0; first < PAGE_TOKENS && first < tokens; first += TOKENS) {
                const int at = begin + first, valid = min(tokens - first, TOKENS);
                float s[EIGHTS][N][4];
                uint32_t w[EIGHTS][N][2];
                wait_for_team(team, team_warps); /* values before these have been read */
                decode<true>(entry, first, valid);
                multiply_keys(s);
                add_scores(s);
                decode<false>(entry, first, valid);
                weigh(s, at, changes || valid < TOKENS || at < seen.from || at + TOKENS - 1 > seen.to, w);
                multiply_values(w);
            }
            entry = next;
            next = entry_of(page + 2 * teams);
        }
    }

    KVANT_INLINE float *results() const
    {
        return reinterpret_cast<float *>(memory + places.tiles);
    }

    /* Adds the teams' sums: to the first team, and from there to results, a row after the other. */
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
        __syncthreads(); /* nobody reads tiles any more */
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
#pragma unroll 1
        for (int half = teams / 2; half > 0; half /= 2) {
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
                            results()[(8 * t + row_of(k & 1)) * d + channel + 8 * (k >> 1)] = o[t][i][k];
                }
        __syncthreads();
    }

    /* use(number in place n of shared memory, the lane's own) */
    template <class F> KVANT_INLINE void each_sum(int n, F &&use)
    {
        float *there = results() + n * S::ROWS * d + S::ROWS * first_channel + lane;
        unrolled_for (int t = 0; t < EIGHTS; t++)
            unrolled_for (int i = 0; i < S::OUT_TILES; i++)
                if (first_channel + 16 * i < end_channel)
                    unrolled_for (int k = 0; k < 4; k++)
                        use(there[((i * EIGHTS + t) * 4 + k) * 32], o[t][i][k]);
    }

    KVANT_INLINE float *part_of(int part) const
    {
        return p.partials + (size_t)(work.item * p.splits + part) * (S::ROWS * (d + 2));
    }

    KVANT_INLINE void leave() const
    {
        float *to = part_of(work.part);
        for (int i = threadIdx.x; i < work.pair.n_columns * d; i += blockDim.x)
            __stcg(to + i, results()[i]);
        for (int i = threadIdx.x; i < work.pair.n_columns; i += blockDim.x)
            __stcg(reinterpret_cast<float2 *>(to + S::ROWS * d) + i, make_float2(rows.max[i], rows.sum[i]));
    }

    /* 32 channels of row n of all parts, in their order. */
    KVANT_INLINE void add_parts(int n, int channel) const
    {
        auto scalars = [&](int i) {
            return i < p.splits ? __ldcg(reinterpret_cast<const float2 *>(part_of(i) + S::ROWS * d) + n) : make_float2(NEVER, 0);
        };
        const float *first = part_of(0) + n * d + min(channel + lane, d - 1);
        float top = NEVER, total = 0, x = 0;
        for (int i = lane; i < p.splits; i += 32)
            top = fmaxf(top, scalars(i).x);
        top = largest_of(top);
#pragma unroll 1
        for (int from = 0; from < p.splits; from += 32) {
            const float2 own = scalars(from + lane);
            const float weight = exp2_fast(own.x - top);
            total += weight * own.y;
#pragma unroll 8
            for (int i = 0; i < min(p.splits - from, 32); i++)
                x += __shfl_sync(FULL, weight, i) * __ldcg(first + (size_t)(from + i) * (S::ROWS * (d + 2)));
        }
        total = warp_sum(total);
        if (channel + lane < d)
            results()[n * d + channel + lane] = x;
        if (channel + lane == 0)
            rows.max[n] = top, rows.sum[n] = total;
    }

    /* As write_output of combine.cuh. */
    KVANT_INLINE void write(int n) const
    {
        const kvant_cuda_wide_rotation &rotation = p.values.any.rotation;
        float *sums = results() + n * d;
        const Column column = column_of<true>(p, work.pair, n);
        const QueryRow row = query_row(p, work.pair.b, column.token);
        const SoftmaxEnd end = end_of<true>(p, column.head, rows.max[n], rows.sum[n]);
        each_channel([&](int channel) { sums[channel] *= end.factor; });
        if (rotation.block)
            turn(sums, rotation);
        each_channel([&](int channel) {
            const int at = work.pair.kv_head * d + channel;
            float x = signed_by(rotation, sums[channel], channel);
            x *= p.v_scale ? p.v_scale[at] : 1;
            x += p.v_center ? end.share * p.v_center[at] : 0;
            store_number(p.out, row.out + column.head * p.out_head_stride + channel, p.type, x);
        });
        if (p.lse && lane == 0)
            p.lse[row.row * p.kv_heads * p.heads_a_kv + column.head] = end.lse;
    }

    KVANT_INLINE void finish()
    {
        add_warps();
        if (p.splits > 1) {
            leave();
            if (!ends_last(p.counters + work.item, p.splits, rows.before))
                return;
            const int rows_here = work.pair.n_columns;
#pragma unroll 1
            for (int i = warp; i < rows_here * ((d + 31) / 32); i += warps)
                add_parts(i % rows_here, i / rows_here * 32);
            __syncthreads();
        }
#pragma unroll 1
        for (int n = warp; n < work.pair.n_columns; n += warps)
            write(n);
    }
};

template <int EIGHTS, Decoders WITH>
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
    attention.load_queries();
    __syncthreads();
    attention.begin();
    attention.run();
    attention.finish();
}

template <int EIGHTS, Decoders WITH>
static kvant_status launch(AnyAttentionArgs &p, int multiprocessors, int shared_bytes, cudaStream_t stream)
{
    using S = AnyShape<EIGHTS>;
    const int team = team_of((int)p.keys.params.head_dim);
    int warps = MOST_WARPS, bytes;
    while ((bytes = AnyPlaces(p.keys, p.values, S::ROWS, warps).end) > shared_bytes && warps > team)
        warps /= 2;
    const int64_t rows = (int64_t)p.query_tokens * p.heads_a_kv, tiles = (rows + S::ROWS - 1) / S::ROWS,
                  items = tiles * p.batch * p.kv_heads;
    p.tiles = (int)tiles;
    p.splits = (int)std::max<int64_t>(std::min<int64_t>(S::BLOCKS * multiprocessors / items, p.max_tokens / (warps / team * PAGE_TOKENS)), 1);
    if (items * p.splits > INT_MAX || bytes > shared_bytes)
        return KVANT_ERR_UNSUPPORTED;
    const void *kernel = (const void *)attention_any_kernel<EIGHTS, WITH>;
    const cudaError_t error = allow_shared(kernel, bytes);
    if (error != cudaSuccess)
        return from_cuda(error);
    attention_any_kernel<EIGHTS, WITH><<<(unsigned)(items * p.splits), warps * 32, bytes, stream>>>(p);
    return from_cuda(cudaGetLastError());
}

bool prefers_any(const kvant_cuda_attention_args &args, uint32_t rows)
{
    return rows <= AnyShape<2>::ROWS && std::max(decoders_for(*args.k_codec), decoders_for(*args.v_codec)) == Decoders::PLAIN;
}

kvant_status launch_attention_any(const kvant_cuda_attention_args &args, const AttentionArgs &common,
                                  int multiprocessors, int shared_bytes, cudaStream_t stream)
{
    AnyAttentionArgs p{};
    static_cast<AttentionArgs &>(p) = common;
    p.keys = *args.k_codec;
    p.values = *args.v_codec;
    using Launch = kvant_status (*)(AnyAttentionArgs &, int, int, cudaStream_t);
    static const Launch launches[2][3] = { { launch<1, Decoders::PLAIN>, launch<1, Decoders::TILES>, launch<1, Decoders::ALL> },
                                           { launch<2, Decoders::PLAIN>, launch<2, Decoders::TILES>, launch<2, Decoders::ALL> } };
    const bool many = (int64_t)p.query_tokens * p.heads_a_kv > 8;
    return launches[many][(int)std::max(decoders_for(p.keys), decoders_for(p.values))](p, multiprocessors, shared_bytes, stream);
}

} // namespace kvant
