/* spherical.c - the spherical + JL baseline of the HQMQ paper (`sph_r4_jl4` in its tables). The
 * direction of a chunk is the nearest of the 24 Hurwitz units. The code of the remainder is the
 * signs of its projections on J seeded directions, which are orthonormal in groups of four.
 *
 * The paper counts log2 24 + r + J bits per chunk. That leaves no room for the length of the
 * remainder, which the decoder needs. Here this length is a constant share of the radius: the best
 * share for uniformly distributed directions. */
#include <math.h>

#include "../../base/random.h"
#include "../../math/quaternion.h"
#include "direction.h"

#define MAX_SIGNS 8u /* 2^8 signs times 24 units are 6144 codewords */
/* Directions from which the length of the remainder is estimated; the estimate is then off by some
 * 0.5 %. */
#define SAMPLES 4096

/* Bit k of the result: whether the projection of x - |x| unit on direction k is negative. */
static uint32_t projection_signs(const float x[4], uint32_t unit, const float *directions,
                                 uint32_t n_signs)
{
    const float norm = sqrtf((x[0] * x[0] + x[1] * x[1]) + (x[2] * x[2] + x[3] * x[3]));
    const kvant_quaternion p = kvant_hurwitz_unit(unit);
    float rest[4];
    uint32_t signs = 0;
    for (uint32_t i = 0; i < 4; i++)
        rest[i] = x[i] - norm * (float)p.c[i];
    for (uint32_t k = 0; k < n_signs; k++) {
        const float *g = directions + (size_t)4 * k;
        signs |=
            (uint32_t)((rest[0] * g[0] + rest[1] * g[1]) + (rest[2] * g[2] + rest[3] * g[3]) < 0)
            << k;
    }
    return signs;
}

static uint32_t count_signs(const kvant_direction *direction)
{
    uint32_t n = 0;
    while (KVANT_HURWITZ_UNITS << n < direction->n_codewords)
        n++;
    return n;
}

static uint32_t nearest(const kvant_direction *direction, const float x[4])
{
    const uint32_t unit = kvant_direction_closest_unit(x);
    return unit + KVANT_HURWITZ_UNITS *
                      projection_signs(x, unit, direction->table, count_signs(direction));
}

static void search(const kvant_direction *direction, const kvant_kernels *kernels, const float *x,
                   uint32_t n, uint32_t *index)
{
    (void)kernels;
    for (uint32_t c = 0; c < n; c++) {
        const float chunk[4] = { x[c], x[KVANT_DIRECTION_MAX_CHUNKS + c],
                                 x[2 * KVANT_DIRECTION_MAX_CHUNKS + c],
                                 x[3 * KVANT_DIRECTION_MAX_CHUNKS + c] };
        index[c] = nearest(direction, chunk);
    }
}

/* Fills the directions. Each group of four is 1, i, j, k times a random quaternion, which is a
 * random orthonormal frame. */
static void fill_directions(float *directions, uint32_t n_signs, uint64_t *state)
{
    kvant_quaternion turn = { { 0 } };
    for (uint32_t k = 0; k < n_signs; k++) {
        if (k % 4 == 0)
            turn = kvant_quaternion_random(state);
        const kvant_quaternion unit = kvant_hurwitz_unit(2 * (k % 4));
        const kvant_quaternion g = kvant_quaternion_multiply(&unit, &turn);
        for (uint32_t i = 0; i < 4; i++)
            directions[4 * k + i] = (float)g.c[i];
    }
}

/* The sum of the directions with the signs that the bits of `signs` say. */
static void signed_sum(const float *directions, uint32_t n_signs, uint32_t signs, double sum[4])
{
    for (uint32_t i = 0; i < 4; i++) {
        sum[i] = 0;
        for (uint32_t k = 0; k < n_signs; k++)
            sum[i] += signs >> k & 1 ? -directions[4 * k + i] : directions[4 * k + i];
    }
}

/* The factor a that makes unit + a signed_sum the best approximation of uniformly distributed
 * directions: least squares. */
static double best_length(const kvant_direction *direction, uint32_t n_signs, uint64_t *state)
{
    double product = 0, squares = 0;
    for (uint32_t sample = 0; sample < SAMPLES; sample++) {
        const kvant_quaternion u = kvant_quaternion_random(state);
        const float x[4] = { (float)u.c[0], (float)u.c[1], (float)u.c[2], (float)u.c[3] };
        const uint32_t index = nearest(direction, x);
        const kvant_quaternion p = kvant_hurwitz_unit(index % KVANT_HURWITZ_UNITS);
        double sum[4];
        signed_sum(direction->table, n_signs, index / KVANT_HURWITZ_UNITS, sum);
        for (uint32_t i = 0; i < 4; i++) {
            product += (x[i] - p.c[i]) * sum[i];
            squares += sum[i] * sum[i];
        }
    }
    return squares > 0 ? product / squares : 0;
}

static void fill_tables(kvant_direction *direction, uint32_t n_signs, uint64_t seed)
{
    uint64_t state = kvant_derived_seed(seed, 1);
    fill_directions(direction->table, n_signs, &state);
    const double length = best_length(direction, n_signs, &state);
    for (uint32_t index = 0; index < direction->n_codewords; index++) {
        const kvant_quaternion p = kvant_hurwitz_unit(index % KVANT_HURWITZ_UNITS);
        double sum[4];
        signed_sum(direction->table, n_signs, index / KVANT_HURWITZ_UNITS, sum);
        for (uint32_t i = 0; i < 4; i++)
            direction->codewords[4 * index + i] = (float)(p.c[i] + length * sum[i]);
    }
}

static const kvant_option table[] = { KVANT_SCALE_OPTION(kvant_direction_options, KVANT_SCALE_NORM),
                                      { .key = NULL } };

static kvant_status create_spherical(kvant_codec *codec, const kvant_request *request,
                                     const kvant_error *error)
{
    static const kvant_direction_field fields[2] = { { "r", 2, 8 }, { "jl", 0, MAX_SIGNS } };
    uint32_t numbers[2] = { 4, 4 };
    kvant_direction_options o = *(const kvant_direction_options *)request->options;
    o.med = o.slots = KVANT_OPTION_ABSENT; /* this family has no outliers */
    KVANT_FORWARD(kvant_direction_variant(request->spec, fields, numbers, error));
    const kvant_direction_shape shape = { .n_codewords = KVANT_HURWITZ_UNITS << numbers[1],
                                          .radius_bits = numbers[0],
                                          .code_bits =
                                              log2(KVANT_HURWITZ_UNITS) + numbers[0] + numbers[1],
                                          .table_floats = (size_t)4 * MAX_SIGNS,
                                          .search = search,
                                          .searches_by = KVANT_SEARCH_SIGNS };
    KVANT_FORWARD(kvant_direction_create(codec, request, &o, &shape, error));
    fill_tables(codec->state, numbers[1], request->location->seed);
    kvant_codec_describe(codec, table, &o, "spherical-r%ujl%u", (unsigned)numbers[0],
                         (unsigned)numbers[1]);
    return kvant_direction_offer_codes(codec);
}

KVANT_FAMILY(spherical, "r4jl4", "HQMQ, baseline of section 4",
             "4-channel chunks: Hurwitz unit, signs of the remainder, radius", table,
             kvant_common_options_ordered, create_spherical)
