/* multiply.cuh - multiplies a warpgroup's query rows with unpacked pages: scores, online softmax in
 * fp32, weights rounded to fp16, values.
 *
 * Weights are 2^(score + log2(unit of the values' page) - maximum). So units of pages cost nothing,
 * and fp16 weights use their range for values of any size. */
#pragma once

#include "tile_rows.cuh"

namespace kvant
{

/* The softmax state of a lane's two rows (index h): the running maximum and sum, and the sums of
 * values. */
template <int D> struct RowSums {
    float o[D / 8][4], max[2], sum[2];

    KVANT_INLINE void clear()
    {
        unrolled_for (int i = 0; i < D / 8; i++)
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
        max[0] = max[1] = NEVER, sum[0] = sum[1] = 0;
    }

    /* Raises the maximum when a score exceeds it by more than SLACK (softmax.cuh). Returns true if
     * it did; then the caller has to scale the sums of values down. */
    KVANT_INLINE bool raise(const float (&s)[8][4], const float (&factor)[2],
                            const float (&unit)[2], float (&shrink)[2])
    {
        float top[2];
        unrolled_for (int h = 0; h < 2; h++) {
            top[h] = s[0][2 * h];
            unrolled_for (int j = 0; j < 8; j++)
                top[h] = fmaxf(top[h], fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            top[h] = top[h] * factor[h] + unit[h];
        }
        if (!__any_sync(FULL, top[0] > max[0] + SLACK || top[1] > max[1] + SLACK))
            return false;
        unrolled_for (int h = 0; h < 2; h++) {
            top[h] = fmaxf(top[h], __shfl_xor_sync(FULL, top[h], 1));
            top[h] = fmaxf(max[h], fmaxf(top[h], __shfl_xor_sync(FULL, top[h], 2)));
            shrink[h] = exp2_fast(max[h] - top[h]);
            max[h] = top[h];
            sum[h] *= shrink[h];
        }
        return true;
    }

    KVANT_INLINE void scale(const float (&shrink)[2])
    {
        unrolled_for (int i = 0; i < D / 8; i++)
            unrolled_for (int h = 0; h < 2; h++)
                o[i][2 * h] *= shrink[h], o[i][2 * h + 1] *= shrink[h];
    }

    /* Computes weights from the scores s[j] * factor. The argument `unit` is the logarithm of the
     * values' unit plus a term that is equal for all scores of a row. The argument `inverse` is 1 /
     * the values' unit. */
    KVANT_INLINE void weigh(float (&s)[8][4], const float (&factor)[2], const float (&unit)[2],
                            float inverse)
    {
        const float shift[2] = { unit[0] - max[0], unit[1] - max[1] };
        float total[2] = { 0, 0 };
        unrolled_for (int j = 0; j < 8; j++)
            unrolled_for (int h = 0; h < 2; h++) {
                s[j][2 * h] = exp2_fast(fmaf(s[j][2 * h], factor[h], shift[h]));
                s[j][2 * h + 1] = exp2_fast(fmaf(s[j][2 * h + 1], factor[h], shift[h]));
                total[h] += s[j][2 * h] + s[j][2 * h + 1];
            }
        sum[0] += total[0] * inverse;
        sum[1] += total[1] * inverse;
    }
};

/* Rounds weights to fp16, as an operand. */
KVANT_INLINE void round_weights(const float (&s)[8][4], uint32_t (&w)[4][4])
{
    unrolled_for (int j = 0; j < 8; j++)
        unrolled_for (int h = 0; h < 2; h++)
            w[j / 2][2 * (j % 2) + h] = pack_half2(s[j][2 * h], s[j][2 * h + 1]);
}

/* Applies softcap, mask or ALiBi to the scores of one page, and hides tokens. Scores are multiplied
 * by factor first, unless nothing has to be changed. */
template <class Rows>
KVANT_INLINE void change_rows(const TileShape &p, const Rows &rows, const int (&row)[2],
                              const Seen &seen, int first, int length, int lane, float (&s)[8][4],
                              float (&factor)[2])
{
    const bool biased = p.softcap_log2 > 0 || p.mask || p.max_bias > 0,
               hides = first < seen.from || first + PAGE_TOKENS - 1 > seen.to ||
                       first + PAGE_TOKENS > length;
    if (!biased && !hides)
        return;
    unrolled_for (int h = 0; h < 2; h++) {
        const int position = rows.position[row[h]];
        const float slope = rows.slope[row[h]];
        const uint16_t *mask = p.mask + rows.mask_row[row[h]];
        unrolled_for (int i = 0; i < 16; i++) {
            float &x = s[i / 2][2 * h + i % 2];
            const int token = first + 8 * (i / 2) + 2 * (lane & 3) + i % 2;
            x *= factor[h];
            if (p.softcap_log2 > 0)
                x = soften(x, p.softcap_log2);
            if (p.mask)
                x += token < length ? slope * __half2float(__ushort_as_half(__ldg(mask + token)))
                                    : 0;
            else if (p.max_bias > 0)
                x += slope * (float)(token - position);
            if (token >= length || (p.causal && token > position) || position - token >= p.window)
                x = -INFINITY;
        }
        factor[h] = 1;
    }
}

/* A stage of the ring of matrices, and the phase of its barriers for the page in it. */
struct RingPhase {
    int at, phase;

    KVANT_INLINE RingPhase after(int pages, int stages) const
    {
        const bool wraps = at + pages >= stages;
        return RingPhase{ at + pages - (wraps ? stages : 0), phase ^ (wraps ? 1 : 0) };
    }
};

/* Multiplies a warpgroup's rows with all pages. The products of a page's values run during the
 * softmax of the next page. UNITS_FIRST: units of values arrive with the keys. */
template <class P, int D, int GROUPS, bool UNITS_FIRST> struct Multiplier {
    const TileShape &p;
    const TileWork &work;
    uint8_t *queries; /* queries of all warpgroups */
    int group;
    const uint8_t *keys;
    TileRows<GROUPS> &rows;
    const Seen seen;
    int lane;
    int row[2]; /* the lane's rows of the tile */

    KVANT_INLINE const uint8_t *keys_of(RingPhase ring_phase) const
    {
        return keys + ring_phase.at * KEY_TILE_BYTES<D>;
    }

    KVANT_INLINE const uint8_t *values_of(RingPhase ring_phase) const
    {
        return keys + p.stages * KEY_TILE_BYTES<D> + ring_phase.at * VALUE_TILE_BYTES<D>;
    }

    KVANT_INLINE void wait_full(bool values, RingPhase ring_phase) const
    {
        barrier_wait(rows.barriers.full[values][ring_phase.at], ring_phase.phase);
    }

    KVANT_INLINE void leave(bool values, RingPhase ring_phase) const
    {
        arrive_at(rows.barriers.empty[values][ring_phase.at], lane);
    }

    /* The first row of the warp, among the rows of its warpgroup. */
    KVANT_INLINE int warp_row() const
    {
        return row[0] % GROUP_ROWS - lane / 4;
    }

    /* Loads the products of the lane's rows with the page's own centre, which are added to scores
     * after multiplying by scale_log2. If there are enough registers, the loads start before the
     * page's products. */
    KVANT_INLINE void request_offsets(int at, float (&offset)[2]) const
    {
        const int page = work.first_page + at;
        offset[0] = offset[1] = 0;
        if (!p.page_offsets)
            return;
        if (UNITS_FIRST && page + 1 < work.end_page)
            prefetch_line(offsets_of(p, work.pair, page + 1) + min(row[0], work.pair.n_columns - 1),
                          0);
        unrolled_for (int h = 0; h < 2; h++)
            offset[h] = page_offset(work.pair, offsets_of(p, work.pair, page), row[h]);
    }

    /* Computes weights from scores, without rounding them; true if the sums of values have to be
     * scaled down. */
    KVANT_INLINE bool weigh(RingPhase ring_phase, int at, float (&offset)[2], float (&s)[8][4],
                            RowSums<D> &sums, float (&shrink)[2]) const
    {
        if (!UNITS_FIRST)
            request_offsets(at, offset);
        float4 unit = rows.units[ring_phase.at];
        leave(false, ring_phase);
        float added[2]; /* for a hidden page, offsets may be NaN */
        unrolled_for (int h = 0; h < 2; h++)
            added[h] = unit.x == HIDDEN ? 0 : offset[h] * p.scale_log2;
        float factor[2] = { rows.factor[row[0]] * unit.x, rows.factor[row[1]] * unit.x };
        change_rows(p, rows, row, seen, (work.first_page + at) * PAGE_TOKENS,
                    unit.x == HIDDEN ? 0 : work.length, lane, s, factor);
        if (!UNITS_FIRST) {
            wait_full(true, ring_phase);
            unit = rows.units[ring_phase.at];
        }
        if (warp_row() < work.pair.n_columns - (row[0] & -GROUP_ROWS)) {
            unrolled_for (int h = 0; h < 2; h++)
                added[h] += unit.y;
            const bool raised = sums.raise(s, factor, added, shrink);
            sums.weigh(s, factor, added, unit.z);
            return raised;
        }
        unrolled_for (int j = 0; j < 8; j++) /* none of the warp's rows exists */
            s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
        return false;
    }

    KVANT_INLINE const uint8_t *own_queries() const
    {
        return queries + group * TileMemory<D, GROUPS>::QUERY_BYTES;
    }

    /* Replaces the queries by queries for the transform of a page's keys. All products are done. */
    KVANT_INLINE void change_matrix(int page, RowSums<D> &sums) const
    {
        const float bias[2] = { rows.bias[row[0]], rows.bias[row[1]] };
        const int first = GROUP_ROWS * group + warp_row();
        meet_at(1 + group, GROUP_THREADS);
        load_queries<P, D>(p, work, matrix_at(p, work, page), queries, rows, first,
                           first + WARP_ROWS, 1, lane);
        meet_at(1 + group, GROUP_THREADS);
        unrolled_for (int h = 0; h < 2; h++)
            sums.max[h] += bias[h] - rows.bias[row[h]];
    }

    KVANT_INLINE void run(RowSums<D> &sums) const
    {
        const int end = work.end_page - work.first_page;
        if (end <= 0)
            return;
        int change =
            end_of_run(p, work.pair.b, work.first_page, work.end_page, lane) - work.first_page;
        float s[8][4], shrink[2], offset[2];
        uint32_t w[4][4];
        RingPhase ring_phase{ 0, 0 };
        if (UNITS_FIRST)
            request_offsets(0, offset);
        wait_full(false, ring_phase);
        P::begin();
        P::template scores<D>(s, own_queries(), keys_of(ring_phase), warp_row(), lane);
        P::template finish<0>();
        P::hold(s);
        weigh(ring_phase, 0, offset, s, sums, shrink);
        round_weights(s, w);
        rolled_for (int at = 1; at < end; at++) {
            const RingPhase next = ring_phase.after(1, p.stages);
            if (at == change) {
                change_matrix(work.first_page + at, sums);
                change = end_of_run(p, work.pair.b, work.first_page + at, work.end_page, lane) -
                         work.first_page;
            }
            if (UNITS_FIRST)
                request_offsets(at, offset);
            wait_full(false, next);
            P::hold(sums.o);
            P::hold(w);
            P::begin();
            P::template scores<D>(s, own_queries(), keys_of(next), warp_row(), lane);
            if (UNITS_FIRST)
                wait_full(true, ring_phase);
            P::template add<D>(sums.o, w, values_of(ring_phase), lane);
            P::template finish<1>();
            P::hold(s);
            /* values of the next page overwrite the values of this page, and weigh() waits for
             * them */
            const bool same_place = !UNITS_FIRST && p.stages == 1;
            if (same_place) {
                P::template finish<0>();
                P::hold(sums.o);
                P::hold(w);
                leave(true, ring_phase);
            }
            const bool raised = weigh(next, at, offset, s, sums, shrink);
            P::template finish<0>();
            P::hold(sums.o);
            P::hold(w);
            if (!same_place)
                leave(true, ring_phase);
            round_weights(s, w);
            if (raised)
                sums.scale(shrink);
            ring_phase = next;
        }
        if (UNITS_FIRST)
            wait_full(true, ring_phase);
        P::hold(sums.o);
        P::hold(w);
        P::begin();
        P::template add<D>(sums.o, w, values_of(ring_phase), lane);
        P::template finish<0>();
        P::hold(sums.o);
        unrolled_for (int h = 0; h < 2; h++)
            sums.max[h] += rows.bias[row[h]];
    }
};

/* Stores a warpgroup's rows in shared memory. first_row: the warp's first row among the results. */
template <int D, class Rows>
KVANT_INLINE void store_rows(const RowSums<D> &sums, float *out, Rows &rows, int first_row,
                             int lane)
{
    unrolled_for (int h = 0; h < 2; h++) {
        const int row = first_row + (lane >> 2) + 8 * h;
        float total = sums.sum[h];
        total += __shfl_xor_sync(FULL, total, 1);
        total += __shfl_xor_sync(FULL, total, 2);
        if ((lane & 3) == 0)
            rows.max[row] = sums.max[h], rows.sum[row] = total;
        unrolled_for (int i = 0; i < D / 8; i++)
            *reinterpret_cast<float2 *>(out + row * D + 8 * i + 2 * (lane & 3)) =
                make_float2(sums.o[i][2 * h], sums.o[i][2 * h + 1]);
    }
}

} // namespace kvant
