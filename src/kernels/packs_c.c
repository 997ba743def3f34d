/* packs_c.c - products with the codes of an index in portable C, the reference. */
#include "kernels.h"

static int32_t level_of(const kvant_pack_format *format, const uint8_t *codes, uint32_t dim,
                        uint32_t v)
{
    const uint32_t code = kvant_pack_get(format->bits, codes, dim, v);
    return format->bits == 8 ? (int32_t)code - 128 : format->levels[code];
}

KVANT_PACK_DOTS_FN(kvant_pack_dots_c)
{
    int32_t levels[KVANT_PACK_VECTORS][4];
    for (uint32_t i = 0; i < queries->n * KVANT_PACK_VECTORS; i++)
        dots[i] = 0;
    for (uint32_t quad = 0; quad < format->n_quads; quad++) {
        for (uint32_t v = 0; v < KVANT_PACK_VECTORS; v++)
            for (uint32_t j = 0; j < 4; j++)
                levels[v][j] = level_of(format, codes, 4 * quad + j, v);
        for (uint32_t i = 0; i < queries->n; i++) {
            const int8_t *x = queries->x + ((size_t)quad * queries->n + i) * 4;
            int32_t *sums = dots + (size_t)i * KVANT_PACK_VECTORS;
            for (uint32_t v = 0; v < KVANT_PACK_VECTORS; v++)
                sums[v] += levels[v][0] * x[0] + levels[v][1] * x[1] + levels[v][2] * x[2] +
                           levels[v][3] * x[3];
        }
    }
}

KVANT_PACK_KEYS_FN(kvant_pack_keys_c)
{
    for (uint32_t i = 0; i < n; i++) {
        masks[i] = 0;
        for (uint32_t v = 0; v < KVANT_PACK_VECTORS; v++) {
            const size_t at = (size_t)i * KVANT_PACK_VECTORS + v;
            keys[at] = (float)dots[at] * factors[v] * scales[i];
            if (offsets)
                keys[at] += offsets[v] * weights[i];
            masks[i] |= (uint32_t)(keys[at] >= thresholds[i]) << v;
        }
    }
}
