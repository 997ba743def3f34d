/* search_queries.c - prepares queries for products: rotated, rounded to 8 bits, 32 to a tile. */
#include <math.h>
#include <string.h>

#include "../base/half.h"
#include "search.h"

/* Rounds y to integers of magnitude up to 127. Returns their step. */
static float round_query(const search *s, float *y, uint8_t *codes)
{
    const uint32_t n = s->index->code_dim;
    const float largest = kvant_float_from_bits(s->kernels->magnitude(y, n));
    const kvant_uniform_step step = {
        .inverse = 127 / largest, .low = -127, .high = 127, .offset = -128
    };
    if (largest < 0x1p-100f) { /* a query of zeros: other queries have a number near 1 */
        memset(codes, 128, n);
        return 0;
    }
    s->kernels->uniform_codes(y, n, &step, codes);
    return largest / 127;
}

static void store_query(const search *s, size_t i, const uint8_t *codes)
{
    const uint32_t n = tile_size(s, i / TILE), dim = s->index->code_dim;
    uint8_t *x = (uint8_t *)s->x + i / TILE * tile_bytes(s) + i % TILE * 4;
    int32_t sum = 0;
    for (uint32_t j = 0; j < dim; j++)
        sum += codes[j] - 128;
    for (uint32_t quad = 0; quad < dim / 4; quad++) {
        uint32_t word;
        memcpy(&word, codes + 4 * (size_t)quad, sizeof word);
        word ^= 0x80808080u; /* to signed bytes */
        memcpy(x + (size_t)quad * n * 4, &word, sizeof word);
    }
    for (uint32_t j = dim / 4 * 4; j < dim; j++)
        x[(size_t)(j / 4) * n * 4 + j % 4] = codes[j] ^ 0x80u;
    s->sums[i] = sum;
}

static void prepare_query(search *s, size_t i, uint32_t worker)
{
    const kvant_index *index = s->index;
    const float *q = s->query->rows + i * s->query->stride;
    float *scratch = s->scratch + worker * kvant_index_scratch(index);
    if (kvant_index_check_rows(index, q, 0, 1) != KVANT_OK) {
        atomic_store(&s->refused, true);
        return;
    }
    const kvant_index_row row =
        kvant_index_transform(index, s->kernels, q, true, KVANT_NO_LIST, scratch,
                              s->centred ? s->centred + i * index->dim : NULL);
    const bool offsets = kvant_index_has_offsets(index) || index->n_lists,
               distance = index->metric == KVANT_METRIC_L2;
    /* The scratch after y is free once the transform is done. */
    uint8_t *codes = (uint8_t *)(row.y + index->code_dim);
    const float step = ldexpf(round_query(s, row.y, codes), row.exponent);
    store_query(s, i, codes);
    s->scales[i] = offsets ? step : 1;
    s->weights[i] = row.weight;
    s->steps[i] = distance ? -2 : offsets ? 1 : step;
    s->constants[i] = distance ? row.squared : 0;
}

/* One thread prepares all queries of a tile, because they share cache lines of the processor. */
void kvant_search_prepare_tile(void *context, size_t tile, uint32_t worker)
{
    search *s = context;
    for (uint32_t i = 0; i < tile_size(s, tile); i++)
        prepare_query(s, tile * TILE + i, worker);
}
