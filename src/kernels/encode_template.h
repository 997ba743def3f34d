/* encode_template.h - the loops of encoders for any vector width. The file of each level includes
 * it after the definitions for simd_template.h and
 *
 *   vf_load_unaligned vf_min vf_max, vi_load_float_bits(p) vi_max_unsigned(a, b)
 *   vf_negate_odd(x, distance)   the sign changed where lane / distance is odd
 *   vf_swap(x, distance)         neighbouring blocks of `distance` lanes exchanged; distance is a
 *                                constant, 1, 2, 4 ... LANES / 2
 *   half_store(p, x)             LANES halves, rounded to nearest even
 *   vi_store_bytes(p, v)         low bytes of the lanes
 *   vi_from_whole(x)             whole numbers to integers
 *
 * When n is no multiple of the width, the portable loops process the last numbers. Sums keep 16
 * partial sums in 16 / LANES vectors, at every width. */
#include "../math/sums.h"

#define SUM_VECTORS (16 / LANES)

static KVANT_TO_HALF_FN(NAME(float_to_half))
{
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        half_store(half + i, vf_load_unaligned(x + i));
    kvant_float_to_half_c(x + i, half + i, n - i);
}

/* The dot products of a and some rows of n numbers, whose additions do not depend on each other. */
KVANT_INLINE void dot_some(uint32_t some, const float *a, const float *rows, uint32_t n,
                           float *sums)
{
    float s[4][16];
    vf sum[4][SUM_VECTORS];
    uint32_t i = 0;
    unrolled_for (uint32_t r = 0; r < some; r++)
        unrolled_for (uint32_t v = 0; v < SUM_VECTORS; v++)
            sum[r][v] = vf_zero();
    for (; i + 16 <= n; i += 16)
        unrolled_for (uint32_t v = 0; v < SUM_VECTORS; v++) {
            const vf x = vf_load_unaligned(a + i + v * LANES);
            unrolled_for (uint32_t r = 0; r < some; r++)
                sum[r][v] = vf_add(
                    sum[r][v], vf_mul(x, vf_load_unaligned(rows + r * (size_t)n + i + v * LANES)));
        }
    unrolled_for (uint32_t r = 0; r < some; r++) {
        unrolled_for (uint32_t v = 0; v < SUM_VECTORS; v++)
            vf_store_unaligned(s[r] + v * LANES, sum[r][v]);
        for (uint32_t j = 0; i + j < n; j++)
            s[r][j] += a[i + j] * rows[r * (size_t)n + i + j];
        sums[r] = kvant_sum16(s[r]);
    }
}

static KVANT_DOT_FN(NAME(dot))
{
    float sum;
    dot_some(1, a, b, n, &sum);
    return sum;
}

static KVANT_DOT_ROWS_FN(NAME(dot_rows))
{
    uint32_t row = 0;
    for (; row + 4 <= n_rows; row += 4)
        dot_some(4, a, rows + (size_t)row * n, n, sums + row);
    for (; row < n_rows; row++)
        sums[row] = NAME(dot)(a, rows + (size_t)row * n, n);
}

/* The number of sums that stay in registers while the rows are read. It hides the latency of an
 * addition. The sums are several vectors of one y, or vectors of several y, which share the loaded
 * row. */
#define COMBINED 4

KVANT_INLINE void combine_vectors(uint32_t n_y, uint32_t vectors, const float *rows,
                                  const float *weights, uint32_t k, uint32_t n, float *y)
{
    vf sum[COMBINED][COMBINED];
    unrolled_for (uint32_t r = 0; r < n_y; r++)
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            sum[r][v] = vf_zero();
    for (uint32_t j = 0; j < k; j++) {
        vf x[COMBINED];
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            x[v] = vf_load_unaligned(rows + (size_t)j * n + v * LANES);
        unrolled_for (uint32_t r = 0; r < n_y; r++)
            unrolled_for (uint32_t v = 0; v < vectors; v++)
                sum[r][v] = vf_add(sum[r][v], vf_mul(vf_set(weights[(size_t)r * k + j]), x[v]));
    }
    unrolled_for (uint32_t r = 0; r < n_y; r++)
        unrolled_for (uint32_t v = 0; v < vectors; v++)
            vf_store_unaligned(y + (size_t)r * n + v * LANES, sum[r][v]);
}

KVANT_INLINE void combine_some(uint32_t n_y, const float *rows, const float *weights, uint32_t k,
                               uint32_t n, float *y)
{
    /* levels with vectors of 8 lanes have 16 registers; others have 32 */
    const uint32_t vectors = n_y > 1 && LANES == 8 ? 2 : COMBINED;
    uint32_t i = 0;
    for (; i + vectors * LANES <= n; i += vectors * LANES)
        combine_vectors(n_y, vectors, rows + i, weights, k, n, y + i);
    for (; i + LANES <= n; i += LANES)
        combine_vectors(n_y, 1, rows + i, weights, k, n, y + i);
    for (; i < n; i++)
        for (uint32_t r = 0; r < n_y; r++) {
            float sum = 0;
            for (uint32_t j = 0; j < k; j++)
                sum += weights[(size_t)r * k + j] * rows[(size_t)j * n + i];
            y[(size_t)r * n + i] = sum;
        }
}

static KVANT_COMBINE_ROWS_FN(NAME(combine_rows))
{
    for (; n_y >= COMBINED;
         n_y -= COMBINED, weights += (size_t)COMBINED * k, y += (size_t)COMBINED * n)
        combine_some(COMBINED, rows, weights, k, n, y);
#define COMBINE_LAST(last) combine_some(last, rows, weights, k, n, y)
    KVANT_CALL_CONSTANT(n_y, 3, COMBINE_LAST)
}

/* (a, b) -> (a + b, a - b) within a vector, at one distance. Products with 1 and -1 are exact, so a
 * fused product and sum has the bits of a sum. */
KVANT_INLINE vf butterfly_at(vf x, uint32_t distance)
{
    return vf_fma(x, vf_negate_odd(vf_set(1.0f), distance), vf_swap(x, distance));
}

KVANT_INLINE vf butterfly_lanes(vf x, uint32_t block)
{
    if (block >= 2)
        x = butterfly_at(x, 1);
    if (block >= 4)
        x = butterfly_at(x, 2);
#if LANES >= 8
    if (block >= 8)
        x = butterfly_at(x, 4);
#endif
#if LANES >= 16
    if (block >= 16)
        x = butterfly_at(x, 8);
#endif
    return x;
}

KVANT_INLINE void butterfly_vectors(float *x, uint32_t n, uint32_t distance)
{
    for (uint32_t i = 0; i < n; i += 2 * distance)
        for (uint32_t j = i; j < i + distance; j += LANES) {
            vf a = vf_load_unaligned(x + j), b = vf_load_unaligned(x + j + distance);
            vf_store_unaligned(x + j, vf_add(a, b));
            vf_store_unaligned(x + j + distance, vf_sub(a, b));
        }
}

#define BUTTERFLY_VECTORS 8u

/* Transforms a block that fits the registers; vectors is a constant. */
KVANT_INLINE void hadamard_block(float *x, uint32_t vectors, vf scale)
{
    vf v[BUTTERFLY_VECTORS];
    unrolled_for (uint32_t i = 0; i < vectors; i++)
        v[i] = butterfly_lanes(vf_load_unaligned(x + i * LANES), LANES);
    unrolled_for (uint32_t distance = 1; distance < vectors; distance *= 2)
        unrolled_for (uint32_t i = 0; i < vectors; i++)
            if (!(i & distance)) {
                const vf a = v[i], b = v[i + distance];
                v[i] = vf_add(a, b);
                v[i + distance] = vf_sub(a, b);
            }
    unrolled_for (uint32_t i = 0; i < vectors; i++)
        vf_store_unaligned(x + i * LANES, vf_mul(v[i], scale));
}

static KVANT_HADAMARD_FN(NAME(hadamard))
{
    const vf scale = vf_set((float)(1.0 / sqrt((double)block)));
    if (n % LANES) {
        kvant_hadamard_c(x, n, block);
        return;
    }
    if (block == 4 * LANES || block == 8 * LANES) {
        for (uint32_t i = 0; i < n; i += block)
            if (block == 4 * LANES)
                hadamard_block(x + i, 4, scale);
            else
                hadamard_block(x + i, 8, scale);
        return;
    }
    for (uint32_t i = 0; i < n; i += LANES)
        vf_store_unaligned(x + i, butterfly_lanes(vf_load_unaligned(x + i), block));
    for (uint32_t distance = LANES; distance < block; distance *= 2)
        butterfly_vectors(x, n, distance);
    for (uint32_t i = 0; i < n; i += LANES)
        vf_store_unaligned(x + i, vf_mul(vf_load_unaligned(x + i), scale));
}

static KVANT_RANGE_FN(NAME(range))
{
    if (n < LANES) {
        kvant_range_c(x, n, min, max);
        return;
    }
    vf low = vf_load_unaligned(x), high = low;
    for (uint32_t i = LANES; i < n; i += LANES) {
        uint32_t at =
            i + LANES <= n ? i : n - LANES; /* the last vector may overlap the one before */
        vf v = vf_load_unaligned(x + at);
        low = vf_min(low, v);
        high = vf_max(high, v);
    }
    float lows[LANES], highs[LANES];
    vf_store_unaligned(lows, low);
    vf_store_unaligned(highs, high);
    for (uint32_t width = LANES / 2; width; width /= 2)
        for (uint32_t j = 0; j < width; j++) {
            lows[j] = lows[j + width] < lows[j] ? lows[j + width] : lows[j];
            highs[j] = highs[j + width] > highs[j] ? highs[j + width] : highs[j];
        }
    *min = lows[0];
    *max = highs[0];
}

static KVANT_MAGNITUDE_FN(NAME(magnitude))
{
    if (n < LANES)
        return kvant_magnitude_c(x, n);
    vi largest = vi_set(0);
    for (uint32_t i = 0; i < n; i += LANES) {
        uint32_t at = i + LANES <= n ? i : n - LANES;
        largest = vi_max_unsigned(largest, vi_and(vi_load_float_bits(x + at), vi_set(0x7fffffff)));
    }
    float lanes[LANES];
    vi_store_float_bits(lanes, largest);
    return kvant_magnitude_c(lanes, LANES);
}

static KVANT_UNIFORM_CODES_FN(NAME(uniform_codes))
{
    vf zero = vf_set(step->zero), inverse = vf_set(step->inverse), low = vf_set(step->low);
    vf high = vf_set(step->high), offset = vf_set(step->offset);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf level = vf_round(vf_mul(vf_sub(vf_load_unaligned(x + i), zero), inverse));
        level = vf_min(vf_max(level, low), high);
        vi_store_bytes(codes + i, vi_from_whole(vf_sub(level, offset)));
    }
    kvant_uniform_codes_c(x + i, n - i, step, codes + i);
}
