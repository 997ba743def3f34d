/* look_up_template.h - the loops of encoders that use tables, for vectors of 8 or 16 lanes.
 * Included before simd_template.h, with the definitions for unpack_template.h and
 *
 *   vi_load_bytes(p)                 LANES bytes, zero-extended
 *   vi_add_where_above(v, a, b, n)   v + n where a > b */
#include "../../math/sums.h"

KVANT_INLINE float dot_codes_bits(const float *a, const uint8_t *codes, uint32_t n,
                                  const float *values, uint32_t bits)
{
    float s[16];
    vf sum[16 / LANES];
    uint32_t i = 0;
    value_table entries = table_load(values, 1u << bits);
    for (uint32_t v = 0; v < 16 / LANES; v++)
        sum[v] = vf_zero();
    for (; i + 16 <= n; i += 16)
        for (uint32_t v = 0; v < 16 / LANES; v++) {
            vf x =
                table_look_up(&entries, values, vi_load_bytes(codes + i + v * LANES), 1u << bits);
            sum[v] = vf_add(sum[v], vf_mul(vf_load_unaligned(a + i + v * LANES), x));
        }
    for (uint32_t v = 0; v < 16 / LANES; v++)
        vf_store_unaligned(s + v * LANES, sum[v]);
    for (uint32_t j = 0; i < n; i++, j++)
        s[j] += a[i] * values[codes[i]];
    return kvant_sum16(s);
}

/* The size of a table decides how it is looked up, so it has to be a constant. */
static KVANT_DOT_CODES_FN(NAME(dot_codes))
{
    if (bits <= 3)
        return dot_codes_bits(a, codes, n, values, 3);
    if (bits == 4)
        return dot_codes_bits(a, codes, n, values, 4);
    if (bits == 5)
        return dot_codes_bits(a, codes, n, values, 5);
    return dot_codes_bits(a, codes, n, values, 8);
}

KVANT_INLINE void codebook_codes_bits(const float *x, uint32_t n, float inverse,
                                      const float *thresholds, uint32_t bits, uint32_t table_bits,
                                      uint8_t *codes)
{
    value_table entries = table_load(thresholds, 1u << table_bits);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        vf u = vf_mul(vf_load_unaligned(x + i), vf_set(inverse));
        vi code = vi_set(0);
        for (uint32_t step = 1u << (bits - 1); step; step /= 2) {
            vi at = vi_add(code, vi_set((int)(step - 1)));
            code = vi_add_where_above(
                code, u, table_look_up(&entries, thresholds, at, 1u << table_bits), (int)step);
        }
        vi_store_bytes(codes + i, code);
    }
    kvant_codebook_codes_c(x + i, n - i, inverse, thresholds, bits, codes + i);
}

static KVANT_CODEBOOK_CODES_FN(NAME(codebook_codes))
{
    if (bits <= 3)
        codebook_codes_bits(x, n, inverse, thresholds, bits, 3, codes);
    else if (bits == 4)
        codebook_codes_bits(x, n, inverse, thresholds, 4, 4, codes);
    else if (bits == 5)
        codebook_codes_bits(x, n, inverse, thresholds, 5, 5, codes);
    else
        codebook_codes_bits(x, n, inverse, thresholds, bits, 8, codes);
}
