/* polar.c - PolarQuant as OCTOPUS (section 4) compares it: recursive polar coordinates of the
 * rotated row down to one radius. Every angle has a Lloyd-Max codebook for its density.
 * format.md, "Polar codes", has formulas, order of codes and rounding.
 *
 * Angles are never computed: the sign of a cross product compares an angle with a threshold. Levels
 * of the recursion are arrays, so that each level is one loop. */
#include <math.h>
#include <string.h>

#include "../../base/half.h"
#include "polar.h"

#define MAX_PAIRS (KVANT_MAX_HEAD_DIM / 2)

/* Adds to codes how many thresholds lie below the angle of (a, b), a and b >= 0: b cos t > a sin
 * t. */
static void count_thresholds(const kvant_polar_book *book, uint32_t n_thresholds, const float *a,
                             const float *b, uint32_t n, uint8_t *codes)
{
    for (uint32_t k = 0; k < n_thresholds; k++) {
        float cosine = book->cos_threshold[k], sine = book->sin_threshold[k];
        for (uint32_t i = 0; i < n; i++)
            codes[i] = (uint8_t)(codes[i] + (b[i] * cosine > a[i] * sine));
    }
}

/* Reflects (a, b) into the first quadrant; the quadrant becomes the upper two bits of the code. A
 * point on a boundary counts to the lower quadrant. */
static void fold_quadrants(uint32_t bits, float *a, float *b, uint32_t n, uint8_t *codes)
{
    for (uint32_t i = 0; i < n; i++) {
        float x = a[i], y = b[i];
        bool left = y >= 0 ? x < 0 : x <= 0; /* quadrants 1 and 2 */
        uint32_t quadrant = y >= 0 ? (left ? 1 : 0) : (left ? 2 : 3);
        a[i] = quadrant % 2 ? fabsf(y) : fabsf(x);
        b[i] = quadrant % 2 ? fabsf(x) : fabsf(y);
        codes[i] = (uint8_t)(quadrant << (bits - 2));
    }
}

static void split_pairs(const float *nodes, uint32_t n_pairs, float *a, float *b)
{
    for (uint32_t i = 0; i < n_pairs; i++) {
        a[i] = nodes[2 * i];
        b[i] = nodes[2 * i + 1];
    }
}

static void join_pairs(const float *a, const float *b, uint32_t n_pairs, float *nodes)
{
    for (uint32_t i = 0; i < n_pairs; i++)
        nodes[i] = sqrtf(a[i] * a[i] + b[i] * b[i]);
}

/* The codes of all angles of y, list after list. */
static void encode_angles(const kvant_polar *p, const float *y, uint8_t *codes)
{
    float nodes[KVANT_MAX_HEAD_DIM], a[MAX_PAIRS], b[MAX_PAIRS];
    uint32_t thresholds = (1u << (p->first_bits - 2)) - 1;
    memcpy(nodes, y, p->dim * sizeof *y);
    for (uint32_t l = 0; l < p->depth; l++) {
        const kvant_polar_level *at = &p->levels[l];
        uint32_t n = at->n_pairs;
        split_pairs(nodes, n, a, b);
        memset(codes, 0, n);
        if (l == 0)
            fold_quadrants(p->first_bits, a, b, n, codes);
        count_thresholds(&at->book, thresholds, a, b, n - 1, codes);
        count_thresholds(&at->last, thresholds, a + n - 1, b + n - 1, 1, codes + n - 1);
        join_pairs(a, b, n, nodes);
        if (at->carry)
            nodes[n] = nodes[2 * n];
        codes += n;
        thresholds = (1u << p->bits) - 1;
    }
}

/* Computes the direction that the codes stand for, of norm sqrt(dim), from the root down, in place
 * from the end. */
static void decode_angles(const kvant_polar *p, const uint8_t *codes, float *u)
{
    codes += p->dim - 1;
    u[0] = p->sqrt_dim;
    for (uint32_t l = p->depth; l-- > 0;) {
        const kvant_polar_level *at = &p->levels[l];
        const kvant_polar_book *book = &at->last;
        codes -= at->n_pairs;
        if (at->carry)
            u[2 * at->n_pairs] = u[at->n_pairs];
        for (uint32_t i = at->n_pairs; i-- > 0; book = &at->book) {
            float radius = u[i];
            u[2 * i + 1] = radius * book->sin_level[codes[i]];
            u[2 * i] = radius * book->cos_level[codes[i]];
        }
    }
}

float kvant_polar_quantize(const kvant_polar *p, const kvant_kernels *kernels, const float *y,
                           uint8_t *codes)
{
    float squares = kernels->dot(y, y, p->dim), direction[KVANT_MAX_HEAD_DIM];
    float scale = kvant_half_to_float(kvant_half_from_float(sqrtf(squares) * p->inverse_sqrt_dim));
    encode_angles(p, y, codes);
    if (!p->unbiased || !(scale > 0))
        return scale;
    decode_angles(p, codes, direction);
    float product = kernels->dot(y, direction, p->dim);
    return product > 0 ? squares / product : 0;
}

bool kvant_polar_fits(const kvant_polar *p, const kvant_kernels *kernels, const float *y)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    float squares = kernels->dot(y, y, p->dim);
    return sqrtf(squares) * p->inverse_sqrt_dim <= KVANT_HALF_MAX &&
           kvant_polar_quantize(p, kernels, y, codes) <= KVANT_HALF_MAX;
}

void kvant_polar_dequantize(const kvant_polar *p, const uint8_t *codes, float scale, float *y)
{
    decode_angles(p, codes, y);
    for (uint32_t j = 0; j < p->dim; j++)
        y[j] *= scale;
}

static kvant_status polar_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                const float *y)
{
    return kvant_polar_fits(codec->state, kernels, y) ? KVANT_OK : KVANT_ERR_RANGE;
}

static void polar_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                         uint32_t token, void *page)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM] = { 0 };
    kvant_codec_metadata(codec, page)[token] =
        kvant_half_from_float(kvant_polar_quantize(codec->state, kernels, y, codes));
    kvant_layout_put(&codec->layout, page, token, codes);
}

static void polar_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                         uint32_t token, float *y)
{
    uint8_t codes[KVANT_MAX_HEAD_DIM];
    (void)kernels;
    kvant_layout_get(&codec->layout, page, token, codes);
    kvant_polar_dequantize(codec->state, codes,
                           kvant_half_to_float(kvant_codec_metadata_of(codec, page)[token]), y);
}

static const kvant_quantizer polar_quantizer = { polar_check, polar_encode, polar_decode,
                                                 kvant_unpack_decoded };

/* All nodes of a list but the last hold size numbers; the last holds last_size. */
void kvant_polar_init(kvant_polar *p, uint32_t dim, uint32_t first_bits, uint32_t bits,
                      bool unbiased)
{
    uint32_t n = dim, size = 1, last_size = 1;
    *p = (kvant_polar){ .dim = dim,
                        .first_bits = first_bits,
                        .bits = bits,
                        .unbiased = unbiased,
                        .sqrt_dim = (float)sqrt((double)dim),
                        .inverse_sqrt_dim = (float)(1 / sqrt((double)dim)) };
    for (; n > 1; p->depth++, size *= 2) {
        kvant_polar_level *at = &p->levels[p->depth];
        at->n_pairs = n / 2;
        at->carry = n % 2 == 1;
        uint32_t second = at->carry ? size : last_size;
        if (size == 1)
            kvant_polar_circle_book(first_bits, &at->book);
        else
            kvant_polar_angle_book(size, size, bits, &at->book);
        if (second == size)
            at->last = at->book;
        else
            kvant_polar_angle_book(size, second, bits, &at->last);
        last_size = at->carry ? last_size : size + second;
        n = at->n_pairs + at->carry;
    }
}

static void set_view(kvant_codec *codec)
{
    const kvant_polar *p = codec->state;
    kvant_general_view *view = &codec->view.general;
    kvant_codec_set_tables(codec, sizeof *p);
    view->kind = KVANT_GENERAL_POLAR;
    view->unbiased = p->unbiased;
    view->inverse_sqrt_dim = p->inverse_sqrt_dim;
    view->polar.bits = p->bits;
    view->polar.depth = p->depth;
    view->polar.books = kvant_codec_table_offset(codec, p->levels[0].book.cos_level);
    view->polar.last_books = kvant_codec_table_offset(codec, p->levels[0].last.cos_level);
    view->polar.stride = sizeof p->levels[0] / sizeof(float);
    view->polar.sqrt_dim = p->sqrt_dim;
}

typedef struct polar_options {
    int32_t scale;
} polar_options;

static const kvant_option table[] = { KVANT_SCALE_OPTION(polar_options, KVANT_SCALE_UNBIASED),
                                      { .key = NULL } };

static kvant_status create_polar(kvant_codec *codec, const kvant_request *request,
                                 const kvant_error *error)
{
    const polar_options *o = request->options;
    const uint32_t d = codec->info.head_dim;
    const bool blocks = request->spec->variant && strcmp(request->spec->variant, "3.9") == 0;
    uint32_t bits = 0;
    if (!blocks)
        KVANT_FORWARD(kvant_spec_bits(request->spec, KVANT_POLAR_MIN_BITS, KVANT_POLAR_MAX_BITS,
                                      &bits, error));
    if (d < 2 || d % 2 != 0)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "polar joins channels in pairs, so head_dim %u must be even",
                          (unsigned)d);
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, kvant_transform_random(d), error));
    if (blocks) {
        kvant_codec_describe(codec, table, o, "polar-3.9");
        return kvant_polar_create_blocks(codec, o->scale == KVANT_SCALE_UNBIASED, error);
    }
    KVANT_FORWARD(kvant_codec_alloc_state(codec, sizeof(kvant_polar)));
    kvant_polar_init(codec->state, d, bits, bits, o->scale == KVANT_SCALE_UNBIASED);
    codec->quantizer = &polar_quantizer;
    kvant_codec_set_sizes(codec, bits, KVANT_PAGE_TOKENS, 0);
    set_view(codec);
    kvant_codec_describe(codec, table, o, "polar-%u", (unsigned)bits);
    return KVANT_OK;
}

KVANT_FAMILY(
    polar, "2 3 3.9 4", "PolarQuant; 2, 3, 4 as compared in OCTOPUS, section 4",
    "random rotation, then angles of recursive polar coordinates; 3.9: blocks of 16 channels",
    table, kvant_common_options, create_polar)
