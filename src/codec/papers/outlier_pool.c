/* outlier_pool.c - see outlier_pool.h. Order statistics come from bisection over the bits of
 * squared norms: no copy of the page's norms, which would take half of a small stack. */
#include "outlier_pool.h"

#include <math.h>
#include <string.h>

#include "../../base/half.h"

const char *const kvant_outlier_range_names[] = { "inner", "all", NULL };

kvant_status kvant_outlier_pool_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                      const float *y)
{
    (void)kernels;
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        KVANT_RETURN_IF(!(fabsf(y[j]) <= KVANT_HALF_MAX), KVANT_ERR_RANGE);
    return KVANT_OK;
}

static float channel(const kvant_outlier_pool *pool, const float *row, uint32_t chunk, uint32_t i)
{
    return 4 * chunk + i < pool->head_dim ? row[4 * chunk + i] : 0;
}

/* The bits of a non-negative number, which are in the order of the numbers. */
static uint32_t square_bits(const kvant_outlier_pool *pool, const float *row, uint32_t chunk)
{
    const float a = channel(pool, row, chunk, 0), b = channel(pool, row, chunk, 1),
                c = channel(pool, row, chunk, 2), d = channel(pool, row, chunk, 3),
                square = (a * a + b * b) + (c * c + d * d);
    uint32_t bits;
    memcpy(&bits, &square, sizeof bits);
    return bits;
}

static uint32_t count_above(const kvant_outlier_pool *pool, const float *y, uint32_t bits)
{
    uint32_t n = 0;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++, y += pool->head_dim)
        for (uint32_t c = 0; c < pool->n_chunks; c++)
            n += square_bits(pool, y, c) > bits;
    return n;
}

/* The least bits that at most n chunks exceed. */
static uint32_t exceeded_by(const kvant_outlier_pool *pool, const float *y, uint32_t n)
{
    uint32_t low = 0,
             high = 0x7F800000u; /* infinity: rows are checked for fp16, whose squares are finite */
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (count_above(pool, y, middle) <= n)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

kvant_outlier_choice kvant_outlier_pool_choose(const kvant_outlier_pool *pool, const float *y)
{
    const uint32_t n = KVANT_PAGE_TOKENS * pool->n_chunks;
    kvant_outlier_choice choice = { exceeded_by(pool, y, n / 2),
                                    0 }; /* n is even: the lower median */
    float limit;
    memcpy(&limit, &choice.above, sizeof limit);
    limit = pool->multiple * pool->multiple * limit;
    memcpy(&choice.above, &limit, sizeof limit);
    if (count_above(pool, y, choice.above) > pool->slots) {
        choice.above = exceeded_by(pool, y, pool->slots);
        choice.ties = pool->slots - count_above(pool, y, choice.above);
    }
    return choice;
}

bool kvant_outlier_is_next(const kvant_outlier_pool *pool, kvant_outlier_choice *choice,
                           const float *row, uint32_t chunk)
{
    const uint32_t bits = square_bits(pool, row, chunk);
    const bool tie = bits == choice->above && choice->ties > 0;
    choice->ties -= tie;
    return tie || bits > choice->above;
}

void kvant_outlier_put(const kvant_outlier_pool *pool, const float *row, uint32_t chunk,
                       uint16_t *slots, uint32_t slot)
{
    for (uint32_t i = 0; i < 4; i++)
        slots[4 * slot + i] = kvant_half_from_float(channel(pool, row, chunk, i));
}

void kvant_outlier_get(const uint16_t *slots, uint32_t slot, float chunk[4])
{
    for (uint32_t i = 0; i < 4; i++)
        chunk[i] = kvant_half_to_float(slots[4 * slot + i]);
}

kvant_status kvant_outlier_pool_resolve(kvant_outlier_pool *pool, int32_t med, int32_t slots,
                                        uint32_t most, const char *name, const kvant_error *error)
{
    const uint32_t n = KVANT_PAGE_TOKENS * pool->n_chunks;
    most = most < n ? most : n;
    if (slots != KVANT_OPTION_ABSENT && (uint32_t)slots > most)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "slots=%d is not valid for %s: use a number from 1 to %u", (int)slots,
                          name, (unsigned)most);
    pool->multiple = (float)med;
    pool->slots = slots != KVANT_OPTION_ABSENT ? (uint32_t)slots : n / 16 < most ? n / 16 : most;
    return KVANT_OK;
}
