/* code_worker.cuh - the work of a warpgroup in a kernel of codes.cuh: it processes its pages one
 * after another and adds up their sums. */
#pragma once

#include "code_rows.cuh"
#include "multiply.cuh"

namespace kvant
{

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/* The factors and summands of scores and weights for the lane's two tokens. These are row lane / 4
 * of the warp's 16 rows, and the row 8 further. */
struct LaneTokens {
    float k_scale[2], k_zero[2], v_scale[2], v_zero[2];
};

template <class KC, class VC, int D, int N, int GROUPS> struct CodesWorker {
    using S = CodesShape<KC, VC, D, N, GROUPS>;
    using V = ValueOperands<VC, D>;
    using K = KeyOperands<KC, D>;
    static constexpr int COLUMNS = S::COLUMNS;
    const TileArgs &p;
    const TileWork &work;
    uint8_t *memory;
    CodesRows<GROUPS, N> &rows;
    uint64_t *codes_there; /* barriers of the slots; index [STAGES]: barrier of the weights */
    const int32_t *table;
    const CodeTable<KC, D> k_table;
    const CodeTable<VC, D> v_table;
    const Seen seen;
    bool plain; /* no score is changed that all rows see */
    int group, warp, lane;

    /* number of operands */
    static constexpr int K_BUFFERS = K::PARTS == 1 || (N > 32 && HAS_ZEROS<VC>) ? 1 : 2,
                         V_BUFFERS = V::PARTS == 1 || V::OPERANDS > 4 ? 1 : 2;
    int phase;            /* phase of the weights' barrier */
    int page;             /* the current page */
    RingPhase ring_phase; /* the phase of its slot */
    /* page table entries of the current page and of the pages after it */
    int entries[S::STAGES + 1];
    float o[V::BLOCKS][N / 8][4], sum[COLUMNS], zero[HAS_ZEROS<VC> ? COLUMNS : 1];

    KVANT_INLINE void wait_for_warp_group() const
    {
        asm volatile("bar.sync %0, %1;" ::"r"(1 + group), "n"(GROUP_THREADS) : "memory");
    }

    KVANT_INLINE bool any_of_group(bool x) const
    {
        uint32_t any;
        asm volatile("{.reg .pred x, any;\nsetp.ne.u32 x, %1, 0;\nbar.red.or.pred any, %2, %3, x;\n"
                     "selp.u32 %0, 1, 0, any;}"
                     : "=r"(any)
                     : "r"((uint32_t)x), "r"(1 + group), "n"(GROUP_THREADS)
                     : "memory");
        return any != 0;
    }

    KVANT_INLINE uint8_t *slot_of(int slot) const
    {
        return memory + S::SLOTS_AT + (S::STAGES * group + slot) * S::SLOT;
    }

    KVANT_INLINE uint8_t *weights() const
    {
        return memory + S::WEIGHTS_AT + group * S::WEIGHT_BYTES;
    }

    KVANT_INLINE int entry_of(int page) const
    {
        return page < work.end_page ? __ldg(table + page) : KVANT_CUDA_NO_BLOCK;
    }

    KVANT_INLINE const uint8_t *page_of(const PageSource &from, int block) const
    {
        return from.base + (size_t)(uint32_t)block * from.block_stride +
               work.pair.kv_head * from.head_stride;
    }

    KVANT_INLINE void fetch_into(int page, int entry, int slot) const
    {
        if (page < work.end_page)
            copy_two(slot_of(slot), entry >= 0 ? page_of(p.k, entry) : nullptr, p.k.bytes,
                     slot_of(slot) + S::K_BYTES, entry >= 0 ? page_of(p.v, entry) : nullptr,
                     p.v.bytes, codes_there[slot], 32 * warp + lane);
    }

    /* Starts the copy of a page into the slot of the page before the current one. */
    KVANT_INLINE void fetch() const
    {
        fetch_into(page + (S::STAGES - 1) * GROUPS, entries[S::STAGES - 1],
                   ring_phase.after(S::STAGES - 1, S::STAGES).at);
    }

    KVANT_INLINE int token_of(int h) const
    {
        return WARP_ROWS * row_tile_of<K>(warp, lane >> 2) + (lane >> 2) + 8 * h;
    }

    KVANT_INLINE LaneTokens lane_tokens(const uint8_t *codes, int valid) const
    {
        const __half *k = reinterpret_cast<const __half *>(codes + S::K_CODES),
                     *v = reinterpret_cast<const __half *>(codes + S::K_BYTES + S::V_CODES);
        constexpr float UNITS = HAS_CHUNKS<KC> ? code_unit<KC, false>() : UNIT;
        const float factor =
            fabsf(p.scale_log2) * UNITS * (HAS_ZEROS<KC> || HAS_CHUNKS<KC> ? 1 : p.k_step);
        LaneTokens t;
        unrolled_for (int h = 0; h < 2; h++) {
            const int token = token_of(h);
            const float k_scale = __half2float(k[token]), v_scale = __half2float(v[token]);
            t.k_scale[h] = k_scale * (h ? factor / KC::ROW8 : factor);
            t.v_scale[h] = token < valid ? v_scale : 0;
            if constexpr (HAS_ZEROS<KC>)
                t.k_zero[h] =
                    p.k_symmetric ? p.k_offset * k_scale : __half2float(k[PAGE_TOKENS + token]);
            if constexpr (HAS_ZEROS<VC>)
                t.v_zero[h] = token >= valid  ? 0
                              : p.v_symmetric ? p.v_offset * v_scale
                                              : __half2float(v[PAGE_TOKENS + token]);
        }
        return t;
    }

    KVANT_INLINE void clear()
    {
        unrolled_for (int b = 0; b < V::BLOCKS; b++)
            unrolled_for (int j = 0; j < N / 8; j++)
                o[b][j][0] = o[b][j][1] = o[b][j][2] = o[b][j][3] = 0;
        unrolled_for (int c = 0; c < COLUMNS; c++)
            sum[c] = 0;
        unrolled_for (int c = 0; c < (HAS_ZEROS<VC> ? COLUMNS : 1); c++)
            zero[c] = 0;
        phase = 0;
    }

    /* s = K q^T for the warp's tokens. meanwhile() runs during the last products. */
    template <class F>
    KVANT_INLINE void multiply_keys(const uint8_t *codes, float (&s)[N / 8][4], F &&meanwhile) const
    {
        const uint64_t q = matrix_at(shared_address(memory));
        const K keys(code_operands<K>(codes, k_table));
        uint32_t a[K_BUFFERS][K::OPERANDS][4];
        unrolled_for (int part = 0; part < K::PARTS; part++) {
            if (part >= K_BUFFERS)
                release<K_BUFFERS - 1>(a[part % K_BUFFERS]);
            keys.unpack(part, a[part % K_BUFFERS]);
            GroupProducts::begin();
            unrolled_for (int i = 0; i < K::OPERANDS; i++) {
                const int k = K::OPERANDS * part + i;
                multiply(s, a[part % K_BUFFERS][i], q + ((k / 4 * N * ROW_BYTES + k % 4 * 32) >> 4),
                         k > 0);
            }
            GroupProducts::commit();
        }
        meanwhile();
        unrolled_for (int i = 0; i < K_BUFFERS; i++)
            release<0>(a[i]);
        GroupProducts::hold(s);
    }

    /* Waits until at most LEFT groups of products are still running, so that operands may be
     * overwritten. */
    template <int LEFT, int OPERANDS> KVANT_INLINE static void release(uint32_t (&a)[OPERANDS][4])
    {
        GroupProducts::finish<LEFT>();
        unrolled_for (int i = 0; i < OPERANDS; i++)
            hold_operand(a[i]);
    }

    template <class T, class Table>
    KVANT_INLINE T code_operands(const uint8_t *page, const Table &own_table) const
    {
        const int tile = row_tile_of<T>(warp, lane >> 2);
        if constexpr (std::is_constructible<T, const uint8_t *, int, int, const Table &>::value)
            return T(page, tile, lane, own_table);
        else
            return T{ page, tile, lane, own_table };
    }

    KVANT_INLINE static void hold_operand(uint32_t (&x)[4])
    {
        asm volatile("" : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])::"memory");
    }

    /* Adds V^T weights^T, after all warps have written weights. */
    KVANT_INLINE void multiply_values(const uint8_t *page)
    {
        const uint64_t w = matrix_at(shared_address(weights()));
        const V own(code_operands<V>(page, v_table));
        uint32_t values[V_BUFFERS][V::OPERANDS][4];
        unrolled_for (int part = 0; part < V::PARTS; part++) {
            if (part >= V_BUFFERS)
                release<V_BUFFERS - 1>(values[part % V_BUFFERS]);
            own.unpack(part, values[part % V_BUFFERS]);
            if (part == 0)
                barrier_wait(codes_there[S::STAGES], phase++);
            GroupProducts::begin();
            unrolled_for (int i = 0; i < V::OPERANDS; i++)
                multiply<1>(o[block_of<V>(part, i)], values[part % V_BUFFERS][i],
                            w + column_tile_of<V>(part, i) * ROW_BYTES, 1);
            GroupProducts::commit();
        }
        unrolled_for (int i = 0; i < V_BUFFERS; i++)
            release<0>(values[i]);
        unrolled_for (int b = 0; b < V::BLOCKS; b++)
            GroupProducts::hold(o[b]);
    }

    KVANT_INLINE float4 columns_at(int j) const
    {
        return rows.columns[group][4 * j + (lane & 3)];
    }

    /* Computes scores (log2) from the products s. For an open page k_zero is 0. */
    KVANT_INLINE void score(float (&s)[N / 8][4], const LaneTokens &t, int first) const
    {
        unrolled_for (int j = 0; j < N / 8; j++)
            unrolled_for (int e = 0; e < 2; e++) {
                const int column = 8 * j + 2 * (lane & 3) + e, position = rows.position[column];
                const float4 c = columns_at(j);
                const float slope = rows.slope[column];
                unrolled_for (int h = 0; h < 2; h++) {
                    float &x = s[j][2 * h + e];
                    const int token = first + token_of(h);
                    x *= t.k_scale[h];
                    if constexpr (HAS_ZEROS<KC>)
                        x += t.k_zero[h] * (e ? c.w : c.z);
                    x *= rows.factor[column];
                    if (p.softcap_log2 > 0)
                        x = soften(x, p.softcap_log2);
                    if (p.mask)
                        x += token < work.length
                                 ? slope * __half2float(__ushort_as_half(
                                               __ldg(p.mask + rows.mask_row[column] + token)))
                                 : 0;
                    else if (p.max_bias > 0)
                        x += slope * (float)(token - position);
                    if (token >= work.length || (p.causal && token > position) ||
                        position - token >= p.window)
                        x = -INFINITY;
                }
            }
    }

    /* Finds, per column, the largest score of the page's tokens, to which the logarithms of the
     * values' scales are added. tops gets the results of all warps. */
    KVANT_INLINE void find_tops(const float (&s)[N / 8][4], const float (&log)[2])
    {
        unrolled_for (int c = 0; c < COLUMNS; c++) {
            float top = fmaxf(s[c / 2][c % 2] + log[0], s[c / 2][2 + c % 2] + log[1]);
            unrolled_for (int k = 4; k < 32; k *= 2)
                top = fmaxf(top, __shfl_xor_sync(FULL, top, k));
            if (lane < 4)
                rows.tops[group][warp][8 * (c / 2) + 2 * lane + c % 2] = top;
        }
        wait_for_warp_group();
    }

    KVANT_INLINE float top_of(int column) const
    {
        const float(&x)[GROUP_WARPS][N] = rows.tops[group];
        return fmaxf(fmaxf(fmaxf(x[0][column], x[1][column]), fmaxf(x[2][column], x[3][column])),
                     NEVER);
    }

    /* Raises the references to the tops plus `more`. */
    KVANT_INLINE void raise(float more)
    {
        float raised[COLUMNS];
        unrolled_for (int c = 0; c < COLUMNS; c++) {
            const float4 own = columns_at(c / 2);
            const float before = c % 2 ? own.y : own.x;
            raised[c] = fmaxf(before, top_of(8 * (c / 2) + 2 * (lane & 3) + c % 2) + more);
            const float shrink = exp2_fast(before - raised[c]);
            sum[c] *= shrink;
            if constexpr (HAS_ZEROS<VC>)
                zero[c] *= shrink;
            unrolled_for (int b = 0; b < V::BLOCKS; b++)
                o[b][c / 2][c % 2] *= shrink, o[b][c / 2][2 + c % 2] *= shrink;
        }
        wait_for_warp_group();
        if (warp == 0 && lane < 4)
            unrolled_for (int j = 0; j < N / 8; j++)
                *reinterpret_cast<float2 *>(&rows.columns[group][4 * j + lane]) =
                    make_float2(raised[2 * j], raised[2 * j + 1]);
        wait_for_warp_group();
    }

    /* Computes exponents, which are scores minus references; true if an exponent is too large. all:
     * s still holds products instead of scores. */
    KVANT_INLINE bool find_exponents(float (&s)[N / 8][4], const LaneTokens &t,
                                     const float (&log)[2], bool all) const
    {
        float top[2] = { NEVER, NEVER };
        unrolled_for (int j = 0; j < N / 8; j++) {
            const float4 c = columns_at(j);
            unrolled_for (int e = 0; e < 2; e++)
                unrolled_for (int h = 0; h < 2; h++) {
                    float &x = s[j][2 * h + e];
                    const float reference = e ? c.y : c.x;
                    if (!all)
                        x -= reference;
                    else if constexpr (HAS_ZEROS<KC>)
                        x = fmaf(x, t.k_scale[h], fmaf(t.k_zero[h], e ? c.w : c.z, -reference));
                    else
                        x = fmaf(x, t.k_scale[h], -reference);
                    top[h] = fmaxf(top[h], x);
                }
        }
        return top[0] + log[0] > SLACK || top[1] + log[1] > SLACK;
    }

    /* Stores weights in shared memory, as the second operand of the values. */
    KVANT_INLINE void store_weights(const uint32_t (&w)[N / 8][2]) const
    {
        const int token =
                      WARP_ROWS * row_tile_of<K>(warp, lane & 7) + 8 * (lane >> 3 & 1) + (lane & 7),
                  k = place_in_operand<VC::ORDER>(token);
        const uint32_t at = shared_address(weights()) + k * ROW_BYTES,
                       piece = ((lane >> 4 ^ k) & 7) * 16;
        unrolled_for (int j = 0; j < N / 8; j += 2) {
            const uint32_t m[4] = { w[j][0], w[j][1], w[j + 1][0], w[j + 1][1] };
            store_matrices(m, at + (piece ^ j * 16));
        }
        GroupProducts::publish();
    }

    KVANT_INLINE void weigh(const float (&s)[N / 8][4], const LaneTokens &t)
    {
        uint32_t w[N / 8][2];
        unrolled_for (int j = 0; j < N / 8; j++) {
            float x[2][2];
            unrolled_for (int e = 0; e < 2; e++)
                unrolled_for (int h = 0; h < 2; h++) {
                    const float one = exp2_fast(s[j][2 * h + e]);
                    sum[2 * j + e] += one;
                    if constexpr (HAS_ZEROS<VC>)
                        zero[2 * j + e] = fmaf(one, t.v_zero[h], zero[2 * j + e]);
                    x[h][e] = one * t.v_scale[h];
                }
            unrolled_for (int h = 0; h < 2; h++)
                w[j][h] = pack_half2(x[h][0], x[h][1]);
        }
        store_weights(w);
    }

    /* Computes a page's weights in shared memory. It does so twice when a score is too large for
     * its column's reference. It always does so for an open page, whose weights are relative to its
     * own largest score. */
    KVANT_INLINE void attend_keys(const uint8_t *codes, int first)
    {
        const int entry = entries[0];
        const bool open = entry < 0, all = plain && !open && first >= seen.from &&
                                           first + PAGE_TOKENS - 1 <= seen.to &&
                                           first + PAGE_TOKENS <= work.length;
        LaneTokens t = open_tokens();
        float s[N / 8][4], log[2] = { 0, 0 };
        rolled_for (bool raising = open, raised = false;;) {
            if (open)
                multiply_open_keys(
                    reinterpret_cast<const uint16_t *>(page_of(p.k_open, -1 - entry)), s);
            else
                multiply_keys(codes, s, [&] {
                    t = lane_tokens(codes, work.length - first);
                    unrolled_for (int h = 0; h < 2; h++)
                        log[h] = log2_fast(fmaxf(t.v_scale[h], 5.9604645e-8f));
                });
            if (!all || raising)
                score(s, t, first);
            if (raising) {
                find_tops(s, log);
                raise(open ? OPEN_EXPONENT : 0);
                if (open)
                    break;
                raising = false, raised = true;
                continue;
            }
            const bool large = find_exponents(s, t, log, all);
            raising = any_of_group(large && !raised); /* the weights before have been read */
            if (!raising)
                break;
        }
        fetch(); /* the codes of the page before have been read */
        if (open)
            weigh_open(s);
        else
            weigh(s, t);
        arrive_at(codes_there[S::STAGES], lane);
    }

    KVANT_INLINE void run()
    {
        page = work.first_page + group;
        ring_phase = RingPhase{ 0, 0 };
        unrolled_for (int i = 0; i <= S::STAGES; i++)
            entries[i] = entry_of(page + i * GROUPS);
        unrolled_for (int i = 0; i < S::STAGES - 1; i++)
            fetch_into(page + i * GROUPS, entries[i], i);
        rolled_for (; page < work.end_page; page += GROUPS) {
            const uint8_t *codes = slot_of(ring_phase.at);
            const int first = page * PAGE_TOKENS;
            barrier_wait(codes_there[ring_phase.at], ring_phase.phase);
            if (entries[0] == KVANT_CUDA_NO_BLOCK) {
                wait_for_warp_group();
                fetch();
            } else {
                attend_keys(codes, first);
                if (entries[0] >= 0)
                    multiply_values(codes + S::K_BYTES);
                else {
                    barrier_wait(codes_there[S::STAGES], phase++);
                    add_open_values(
                        reinterpret_cast<const uint16_t *>(page_of(p.v_open, -1 - entries[0])),
                        work.length - first);
                    wait_for_warp_group(); /* tops have been read */
                }
            }
            ring_phase = ring_phase.after(1, S::STAGES);
            unrolled_for (int i = 0; i < S::STAGES; i++)
                entries[i] = entries[i + 1];
            entries[S::STAGES] = entry_of(page + (S::STAGES + 1) * GROUPS);
        }
    }

    /* ---- open pages: rows of fp16 (open.cuh) ---- */

    KVANT_INLINE void multiply_open_keys(const uint16_t *page, float (&s)[N / 8][4]) const
    {
        const uint64_t q = matrix_at(shared_address(memory));
        constexpr bool CHUNKS = HAS_CHUNKS<KC>;
        rolled_for (int k = 0; k < key_tiles<KC, D>(); k++) {
            uint32_t a[4];
            unrolled_for (int i = 0; i < 4; i++) {
                uint32_t pair = 0;
                unrolled_for (int e = 0; e < 2; e++) {
                    const int at = 16 * k + 2 * (lane & 3) + 8 * (i / 2) + e,
                              channel = channel_at<KC, D>(at);
                    if (!CHUNKS || channel < D)
                        pair |= (uint32_t)__ldg(page + token_of(i % 2) * D + channel) << 16 * e;
                }
                a[i] = pair;
            }
            GroupProducts::begin();
            multiply(s, a, q + ((k / 4 * N * ROW_BYTES + k % 4 * 32) >> 4), k > 0);
            GroupProducts::commit();
            GroupProducts::finish<0>();
            GroupProducts::hold(s);
            hold_operand(a);
        }
    }

    KVANT_INLINE void add_open_values(const uint16_t *page, int valid)
    {
        const uint64_t w = matrix_at(shared_address(weights()));
        const float one = 1 / Accumulator<VC, D>::unit(p.v_step);
        unrolled_for (int b = 0; b < V::BLOCKS; b++) {
            float x[N / 8][4];
            rolled_for (int k = 0; k < 4; k++) {
                uint32_t a[4];
                unrolled_for (int i = 0; i < 4; i++) {
                    uint32_t pair = 0;
                    const int channel = V::channel(b, i % 2, row_tile_of<V>(warp, lane >> 2), lane);
                    unrolled_for (int e = 0; e < 2; e++) {
                        const int token =
                            place_in_operand<VC::ORDER>(16 * k + 2 * (lane & 3) + 8 * (i / 2) + e);
                        if (channel < D && token < valid)
                            pair |= (uint32_t)__ldg(page + token * D + channel) << 16 * e;
                    }
                    a[i] = pair;
                }
                GroupProducts::begin();
                multiply<1>(x, a, w + k * ROW_BYTES, k > 0);
                GroupProducts::commit();
                GroupProducts::finish<0>();
                GroupProducts::hold(x);
                hold_operand(a);
            }
            unrolled_for (int c = 0; c < COLUMNS; c++) {
                const float factor = open_factor(c) * one;
                unrolled_for (int h = 0; h < 2; h++)
                    o[b][c / 2][2 * h + c % 2] +=
                        x[c / 2][2 * h + c % 2] * (h ? factor * VC::ROW8 : factor);
            }
        }
    }

    KVANT_INLINE LaneTokens open_tokens() const
    {
        const float scale = fabsf(p.scale_log2);
        return LaneTokens{ { scale, scale }, { 0, 0 }, { 1, 1 }, { 0, 0 } };
    }

    /* The factor for the weights of an open page. */
    KVANT_INLINE float open_factor(int c) const
    {
        const float4 own = columns_at(c / 2);
        return exp2_fast(top_of(8 * (c / 2) + 2 * (lane & 3) + c % 2) - (c % 2 ? own.y : own.x));
    }

    KVANT_INLINE void weigh_open(float (&s)[N / 8][4])
    {
        uint32_t w[N / 8][2];
        unrolled_for (int c = 0; c < COLUMNS; c++) {
            const float top = top_of(8 * (c / 2) + 2 * (lane & 3) + c % 2);
            float(&x)[4] = s[c / 2];
            x[c % 2] = exp2_fast(x[c % 2] - top);
            x[2 + c % 2] = exp2_fast(x[2 + c % 2] - top);
            sum[c] += (x[c % 2] + x[2 + c % 2]) * open_factor(c);
        }
        unrolled_for (int j = 0; j < N / 8; j++)
            unrolled_for (int h = 0; h < 2; h++)
                w[j][h] = pack_half2(s[j][2 * h], s[j][2 * h + 1]);
        store_weights(w);
    }

    /* ---- the end ---- */

    /* Stores the warpgroup's sums over tokens: the sums of its four warps, in order. The caller
     * synchronises before and after. */
    KVANT_INLINE void leave_sums()
    {
        unrolled_for (int c = 0; c < COLUMNS; c++)
            unrolled_for (int k = 4; k < 32; k *= 2) {
                sum[c] += __shfl_xor_sync(FULL, sum[c], k);
                if constexpr (HAS_ZEROS<VC>)
                    zero[c] += __shfl_xor_sync(FULL, zero[c], k);
            }
        if (lane < 4)
            unrolled_for (int c = 0; c < COLUMNS; c++) {
                const int column = 8 * (c / 2) + 2 * lane + c % 2;
                rows.ends[group][warp][0][column] = sum[c];
                rows.ends[group][warp][1][column] = HAS_ZEROS<VC> ? zero[HAS_ZEROS<VC> ? c : 0] : 0;
            }
    }

    KVANT_INLINE float end_of_group(int which, int column) const
    {
        float total = 0;
        unrolled_for (int w = 0; w < GROUP_WARPS; w++)
            total += rows.ends[group][w][which][column];
        return total;
    }

    KVANT_INLINE void store(float *results) const
    {
        const float unit = Accumulator<VC, D>::unit(p.v_step);
        unrolled_for (int c = 0; c < COLUMNS; c++) {
            const int column = 8 * (c / 2) + 2 * (lane & 3) + c % 2,
                      row = GROUP_ROWS * group + column;
            const float base = HAS_ZEROS<VC> ? end_of_group(1, column) : 0;
            if (warp == 0 && lane < 4) {
                const float4 own = columns_at(c / 2);
                rows.max[row] = c % 2 ? own.y : own.x;
                rows.sum[row] = end_of_group(0, column);
            }
            unrolled_for (int b = 0; b < V::BLOCKS; b++)
                unrolled_for (int h = 0; h < 2; h++) {
                    const int channel = V::channel(b, h, row_tile_of<V>(warp, lane >> 2), lane);
                    if (!HAS_CHUNKS<VC> || channel < D)
                        results[row * D + channel] =
                            o[b][c / 2][2 * h + c % 2] * (h ? unit / VC::ROW8 : unit) + base;
                }
        }
    }
};

#endif

} // namespace kvant
