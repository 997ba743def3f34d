/* hqmq.c - HQMQ: the direction of a chunk is the product of one of the 24 Hurwitz units and one of
 * S secondary quaternions. Sections 3 and B of the paper describe it; format.md, "Direction codes",
 * has the formulas.
 *
 * The paper draws the secondaries at random: `book=random`. The default `book=spread` draws some
 * candidates per secondary and takes the candidate farthest from the preceding secondaries. This
 * costs no bits and lowers the error by a fifth. */
#include <math.h>

#include "../../base/random.h"
#include "direction.h"
#include "../../math/quaternion.h"

/* y = x conj(s), with the same bits as in the search (kernels/quaternion_loops.h). */
static void multiply_conjugate(const float *x, const float *s, float y[4])
{
    const float x0 = x[0], x1 = x[KVANT_DIRECTION_MAX_CHUNKS],
                x2 = x[2 * KVANT_DIRECTION_MAX_CHUNKS], x3 = x[3 * KVANT_DIRECTION_MAX_CHUNKS];
    y[0] = x0 * s[0] + x1 * s[1] + x2 * s[2] + x3 * s[3];
    y[1] = x1 * s[0] - x0 * s[1] + x3 * s[2] - x2 * s[3];
    y[2] = x2 * s[0] - x3 * s[1] - x0 * s[2] + x1 * s[3];
    y[3] = x3 * s[0] + x2 * s[1] - x1 * s[2] - x0 * s[3];
}

static void search(const kvant_direction *direction, const kvant_kernels *kernels, const float *x,
                   uint32_t n, uint32_t *index)
{
    const uint32_t n_secondaries = direction->n_codewords / KVANT_HURWITZ_UNITS;
    for (uint32_t c = 0; c < n; c += KVANT_DIRECTION_LANES) {
        uint32_t which[KVANT_DIRECTION_LANES];
        kernels->closest_cosets(x + c, KVANT_DIRECTION_MAX_CHUNKS, direction->table, n_secondaries,
                                which);
        for (uint32_t j = 0; j < KVANT_DIRECTION_LANES; j++) {
            float y[4];
            multiply_conjugate(x + c + j, direction->table + (size_t)4 * which[j], y);
            index[c + j] = KVANT_HURWITZ_UNITS * which[j] + kvant_direction_closest_unit(y);
        }
    }
}

/* The secondaries before they are rounded. They lie behind the rounded secondaries, which the
 * search reads. */
static kvant_quaternion *unrounded(const kvant_direction *direction, uint32_t n_secondaries)
{
    return (kvant_quaternion *)(void *)(direction->table + (size_t)4 * n_secondaries);
}

/* Fills the view. Directions are rounded from products with the unrounded secondaries, so a reader
 * that computes directions needs these. */
static void set_view(kvant_codec *codec, uint32_t n_secondaries)
{
    kvant_chunk_view *view = &codec->view.of.chunk;
    view->kind = KVANT_CHUNK_QUATERNIONS;
    view->n_secondaries = n_secondaries;
    view->secondaries = unrounded(kvant_direction_of(codec), n_secondaries)->c;
}

/* Fills the tables. Units vary fastest, so the meaning of an index does not depend on S. */
static void fill_tables(kvant_direction *direction, uint32_t n_secondaries, bool spread,
                        uint64_t seed)
{
    kvant_quaternion *secondaries = unrounded(direction, n_secondaries);
    uint64_t state = kvant_derived_seed(seed, 1);
    if (spread)
        kvant_quaternion_spread(&state, n_secondaries, secondaries);
    for (uint32_t s = 0; s < n_secondaries; s++) {
        if (!spread)
            secondaries[s] = kvant_quaternion_random(&state);
        for (uint32_t i = 0; i < 4; i++)
            direction->table[4 * s + i] = (float)secondaries[s].c[i];
        for (uint32_t p = 0; p < KVANT_HURWITZ_UNITS; p++) {
            const kvant_quaternion unit = kvant_hurwitz_unit(p);
            const kvant_quaternion product = kvant_quaternion_multiply(&unit, &secondaries[s]);
            for (uint32_t i = 0; i < 4; i++)
                direction->codewords[4 * (KVANT_HURWITZ_UNITS * s + p) + i] = (float)product.c[i];
        }
    }
}

#define MAX_SECONDARIES 1024 /* a table of codewords then takes 512 KB */

static const char *const median_names[] = { "token", "page", NULL };
static const char *const book_names[] = { "random", "spread", NULL };

static const kvant_option table[] = {
    KVANT_CHOICE(kvant_direction_options, book, book_names, 1, "how the secondaries are drawn"),
    KVANT_SCALE_OPTION(kvant_direction_options, KVANT_SCALE_UNBIASED),
    KVANT_FLAG(kvant_direction_options, med3, "med=3, as in the paper"),
    KVANT_NUMBER(kvant_direction_options, med, 0, 1000, KVANT_OPTION_ABSENT,
                 "chunks longer than N medians stay fp16"),
    KVANT_CHOICE(kvant_direction_options, median, median_names, 0,
                 "the chunks that the median is of"),
    KVANT_CHOICE(kvant_direction_options, range, kvant_outlier_range_names, 0,
                 "chunks that the radius step covers"),
    KVANT_NUMBER(kvant_direction_options, slots, 1, 8192, KVANT_OPTION_ABSENT,
                 "room for such chunks: per token, or per page"),
    { .key = NULL },
};

static kvant_status create_hqmq(kvant_codec *codec, const kvant_request *request,
                                const kvant_error *error)
{
    static const kvant_direction_field fields[2] = { { "s", 1, MAX_SECONDARIES }, { "r", 2, 8 } };
    uint32_t numbers[2] = { 96, 4 };
    kvant_direction_options o = *(const kvant_direction_options *)request->options;
    KVANT_FORWARD(kvant_direction_variant(request->spec, fields, numbers, error));
    const kvant_direction_shape shape = {
        .n_codewords = KVANT_HURWITZ_UNITS * numbers[0],
        .radius_bits = numbers[1],
        .code_bits = log2(KVANT_HURWITZ_UNITS * (double)numbers[0]) + numbers[1],
        .table_floats = (size_t)12 * numbers[0], /* rounded, then in binary64 */
        .search = search,
        .searches_by = KVANT_SEARCH_COSETS
    };
    KVANT_FORWARD(kvant_direction_create(codec, request, &o, &shape, error));
    fill_tables(codec->state, numbers[0], o.book == 1, request->location->seed);
    set_view(codec, numbers[0]);
    kvant_codec_describe(codec, table, &o, "hqmq-s%ur%u", (unsigned)numbers[0],
                         (unsigned)numbers[1]);
    return kvant_direction_offer_codes(codec);
}

KVANT_FAMILY(hqmq, "s24r3 s24r4 s48r4 s96r4 s192r4 s192r6", "HQMQ, section 3 and appendix B",
             "4-channel chunks: Hurwitz unit x secondary quaternion, radius", table,
             kvant_common_options_ordered, create_hqmq)
