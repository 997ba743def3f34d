/* addvq.c - the uncalibrated additive quantiser that the HQMQ paper compares with (appendix Q). A
 * direction is the normalised sum of two entries, one from each of two random codebooks of K
 * quaternions.
 *
 * `search=joint` finds the best of the K^2 sums. `search=greedy` is the authors' search: it finds
 * an entry of the first book, then an entry of the second book for the remainder. */
#include <math.h>

#include "../../base/random.h"
#include "../../math/quaternion.h"
#include "direction.h"

#define MAX_ENTRIES 192u /* of a book; both books take 12 KB of the stack */

static void search_joint(const kvant_direction *direction, const kvant_kernels *kernels,
                         const float *x, uint32_t n, uint32_t *index)
{
    for (uint32_t c = 0; c < n; c += KVANT_DIRECTION_LANES)
        kernels->largest_products(x + c, KVANT_DIRECTION_MAX_CHUNKS, direction->codewords,
                                  direction->n_codewords, index + c);
}

/* Subtracts |x| / 2 times the first entry from x. When both entries point the way of x, each is
 * half of their sum. */
static void subtract_first(const float *x, const float *entries, const uint32_t *first, float *rest)
{
    for (uint32_t j = 0; j < KVANT_DIRECTION_LANES; j++) {
        const float x0 = x[j], x1 = x[KVANT_DIRECTION_MAX_CHUNKS + j],
                    x2 = x[2 * KVANT_DIRECTION_MAX_CHUNKS + j],
                    x3 = x[3 * KVANT_DIRECTION_MAX_CHUNKS + j];
        const float half = sqrtf((x0 * x0 + x1 * x1) + (x2 * x2 + x3 * x3)) * 0.5f;
        for (uint32_t i = 0; i < 4; i++)
            rest[i * KVANT_DIRECTION_LANES + j] =
                x[i * KVANT_DIRECTION_MAX_CHUNKS + j] - half * entries[4 * first[j] + i];
    }
}

static void search_greedy(const kvant_direction *direction, const kvant_kernels *kernels,
                          const float *x, uint32_t n, uint32_t *index)
{
    uint32_t entries = 1;
    while (entries * entries < direction->n_codewords)
        entries++;
    for (uint32_t c = 0; c < n; c += KVANT_DIRECTION_LANES) {
        uint32_t first[KVANT_DIRECTION_LANES], second[KVANT_DIRECTION_LANES];
        float rest[4 * KVANT_DIRECTION_LANES];
        kernels->largest_products(x + c, KVANT_DIRECTION_MAX_CHUNKS, direction->table, entries,
                                  first);
        subtract_first(x + c, direction->table, first, rest);
        kernels->largest_products(rest, KVANT_DIRECTION_LANES,
                                  direction->table + (size_t)4 * entries, entries, second);
        for (uint32_t j = 0; j < KVANT_DIRECTION_LANES; j++)
            index[c + j] = first[j] + entries * second[j];
    }
}

/* Entry i of book b is number b K + i of the stream; codeword i1 + K i2. */
static void fill_tables(kvant_direction *direction, uint32_t n, uint64_t seed)
{
    uint64_t state = kvant_derived_seed(seed, 1);
    kvant_quaternion entries[2 * MAX_ENTRIES];
    for (uint32_t i = 0; i < 2 * n; i++) {
        entries[i] = kvant_quaternion_random(&state);
        for (uint32_t k = 0; k < 4; k++)
            direction->table[4 * i + k] = (float)entries[i].c[k];
    }
    for (uint32_t index = 0; index < n * n; index++) {
        const double *a = entries[index % n].c, *b = entries[n + index / n].c;
        double sum[4], squares = 0;
        for (uint32_t k = 0; k < 4; k++) {
            sum[k] = a[k] + b[k];
            squares += sum[k] * sum[k];
        }
        const double length = sqrt(squares);
        for (uint32_t k = 0; k < 4 && length > 0; k++)
            direction->codewords[4 * index + k] = (float)(sum[k] / length);
    }
}

static const char *const search_names[] = { "joint", "greedy", NULL };

static const kvant_option table[] = {
    KVANT_CHOICE(kvant_direction_options, search, search_names, 0,
                 "the best of all sums, or one entry after the other"),
    KVANT_SCALE_OPTION(kvant_direction_options, KVANT_SCALE_NORM),
    { .key = NULL },
};

static kvant_status create_addvq(kvant_codec *codec, const kvant_request *request,
                                 const kvant_error *error)
{
    static const kvant_direction_field fields[2] = { { "k", 2, MAX_ENTRIES }, { "r", 2, 8 } };
    uint32_t numbers[2] = { 24, 3 };
    kvant_direction_options o = *(const kvant_direction_options *)request->options;
    o.med = o.slots = KVANT_OPTION_ABSENT; /* this family has no outliers */
    KVANT_FORWARD(kvant_direction_variant(request->spec, fields, numbers, error));
    const kvant_direction_shape shape = { .n_codewords = numbers[0] * numbers[0],
                                          .radius_bits = numbers[1],
                                          .code_bits = 2 * log2(numbers[0]) + numbers[1],
                                          .table_floats = (size_t)8 * numbers[0],
                                          .search = o.search ? search_greedy : search_joint,
                                          .searches_by = o.search ? KVANT_SEARCH_GREEDY
                                                                  : KVANT_SEARCH_PRODUCTS };
    KVANT_FORWARD(kvant_direction_create(codec, request, &o, &shape, error));
    fill_tables(codec->state, numbers[0], request->location->seed);
    kvant_codec_describe(codec, table, &o, "addvq-k%ur%u", (unsigned)numbers[0],
                         (unsigned)numbers[1]);
    return kvant_direction_offer_codes(codec);
}

KVANT_FAMILY(addvq, "k24r3 k48r4 k192r4", "HQMQ, appendix Q",
             "4-channel chunks: sum of two random entries, radius", table,
             kvant_common_options_ordered, create_addvq)
