/* octopus_book.c - see octopus.h: one row to codes and back. The search itself is a kernel
 * (kernels/octahedral_loops.h).
 *
 * When head_dim is no multiple of 3, the last triplet has one or two channels. The paper pads it
 * with zeros. But directions with zeros lie between the levels, so the padded triplet errs several
 * times as much as other triplets. At head_dim 64 it makes 6 % of the whole error. Decoders ignore
 * the padding, so it may be anything. Joint rounding tries several paddings in idle lanes and keeps
 * the padding with the least error in the real channels. Decoders need not know the padding.
 * `pad=zero` pads as the paper does. */
#include <math.h>

#include "../../base/half.h"
#include "../../math/octahedral.h"
#include "octopus.h"

/* Paddings of the last triplet, as multiples of the sum of magnitudes of its real channels. They
 * were chosen one after another, each as the best addition to the paddings before it, for 2, 3 and
 * 4 bits. There are as many as fill 16 lanes at the usual head_dims (64, 80, 112, 128, 256,
 * 512). */
static const float pads_of_one[][2] = { { -1, 0.375f },     { -1.25f, -2 },     { 0.375f, -0.375f },
                                        { 0, 0 },           { 1.75f, -0.125f }, { 0.75f, -0.125f },
                                        { -2, 1 },          { 0.75f, 1.25f },   { -0.625f, 2 },
                                        { -0.125f, -0.75f } };
static const float pads_of_two[] = { 0.3125f, 1.25f, 0.0625f, -0.625f, -2, -0.875f };

#define COUNT(array) ((uint32_t)(sizeof(array) / sizeof((array)[0])))

static void fill_thresholds(const float *levels, uint32_t n, float *thresholds,
                            uint32_t n_thresholds)
{
    for (uint32_t k = 0; k < n_thresholds; k++)
        thresholds[k] = k + 1 < n ? (levels[k] + levels[k + 1]) / 2 : INFINITY;
}

void kvant_octopus_book_init(octopus_book *book, uint32_t dim, uint32_t direction_bits,
                             uint32_t norm_bits)
{
    *book = (octopus_book){ .dim = dim,
                            .n_triplets = (dim + 2) / 3,
                            .inverse_sqrt_dim = (float)(1 / sqrt((double)dim)) };
    kvant_triplet_book *t = &book->triplets;
    t->direction_bits = direction_bits;
    t->norm_bits = norm_bits;
    kvant_octahedral_codebook(direction_bits, t->direction);
    kvant_triplet_norm_codebook(dim, norm_bits, t->norm);
    fill_thresholds(t->direction, 1u << direction_bits, t->direction_thresholds,
                    COUNT(t->direction_thresholds));
    fill_thresholds(t->norm, 1u << norm_bits, t->norm_thresholds, COUNT(t->norm_thresholds));
}

/* Loads the last triplet, which lacks channels, once with each padding; returns the number of
 * paddings. */
static uint32_t load_trials(const octopus_book *book, const float *y, float inverse,
                            kvant_triplets *t)
{
    uint32_t at = book->dim / 3, left = book->dim % 3;
    bool plain = book->zero_padding || book->triplets.rounding == KVANT_ROUND_SCALAR;
    uint32_t n = plain ? 1 : left == 1 ? COUNT(pads_of_one) : COUNT(pads_of_two);
    float first = y[3 * at] * inverse, second = left == 2 ? y[3 * at + 1] * inverse : 0;
    float size = fabsf(first) + fabsf(second);
    for (uint32_t i = 0; i < n; i++) {
        t->x[at + i] = first;
        t->y[at + i] = plain || left == 2 ? second : pads_of_one[i][0] * size;
        t->z[at + i] = plain ? 0 : (left == 2 ? pads_of_two[i] : pads_of_one[i][1]) * size;
    }
    return n;
}

/* Loads the rows' triplets side by side, with all trials of the last triplet; returns the number of
 * triplets, a multiple of 16. */
static uint32_t load(const octopus_book *book, const float *y, float inverse, kvant_triplets *t,
                     uint32_t *trials)
{
    uint32_t whole = book->dim / 3;
    for (uint32_t i = 0; i < whole; i++) {
        t->x[i] = y[3 * i] * inverse;
        t->y[i] = y[3 * i + 1] * inverse;
        t->z[i] = y[3 * i + 2] * inverse;
    }
    *trials = book->dim % 3 ? load_trials(book, y, inverse, t) : 0;
    uint32_t n = whole + *trials, padded = (n + 15) / 16 * 16;
    for (uint32_t i = n; i < padded; i++)
        t->x[i] = t->y[i] = t->z[i] = 0;
    return padded;
}

/* The decoded triplet for a scale of 1. */
static void decode_triplet(const kvant_triplet_book *t, uint32_t code, float scale,
                           float decoded[3])
{
    uint32_t mask = (1u << t->direction_bits) - 1;
    float u = t->direction[code & mask], w = t->direction[code >> t->direction_bits & mask], x, y,
          z;
    kvant_octahedral_point(u, w, &x, &y, &z);
    float factor = scale * t->norm[code >> (2 * t->direction_bits)] / sqrtf(x * x + y * y + z * z);
    decoded[0] = factor * x;
    decoded[1] = factor * y;
    decoded[2] = factor * z;
}

/* Moves the trial with the least error in its real channels to the place of the last triplet; the
 * first of equal trials wins. */
static void settle_last(const octopus_book *book, uint32_t trials, kvant_triplets *t)
{
    uint32_t at = book->dim / 3, best = at;
    bool two = book->dim % 3 == 2;
    float least = 0, product = 0;
    for (uint32_t i = at; i < at + trials; i++) {
        float decoded[3];
        decode_triplet(&book->triplets, t->code[i], 1, decoded);
        float dx = t->x[i] - decoded[0], dy = two ? t->y[i] - decoded[1] : 0,
              error = dx * dx + dy * dy;
        if (i == at || error < least) {
            least = error;
            best = i;
            product = t->x[i] * decoded[0] + (two ? t->y[i] * decoded[1] : 0);
        }
    }
    t->code[at] = t->code[best];
    t->norm[at] = 1;
    t->along[at] = product;
}

float kvant_octopus_quantize(const octopus_book *book, const kvant_kernels *kernels, const float *y,
                             uint32_t *codes)
{
    kvant_triplets t;
    uint32_t trials;
    float squares = kernels->dot(y, y, book->dim);
    float scale =
        kvant_half_to_float(kvant_half_from_float(sqrtf(squares) * book->inverse_sqrt_dim));
    float inverse = scale > 0 ? 1 / scale : 0;
    kernels->triplet_codes(&book->triplets, load(book, y, inverse, &t, &trials), &t);
    if (trials)
        settle_last(book, trials, &t);
    for (uint32_t i = 0; i < book->n_triplets; i++)
        codes[i] = t.code[i];
    if (!book->unbiased)
        return scale;
    float product = kernels->dot(t.norm, t.along, book->n_triplets);
    float unbiased = product > 0 ? squares * inverse / product : 0;
    /* A row that its codes hardly resemble would get a scale without bound. */
    return product > 0 && unbiased <= 4 * scale ? unbiased : scale;
}

bool kvant_octopus_fits(const octopus_book *book, const kvant_kernels *kernels, const float *y)
{
    uint32_t codes[KVANT_MAX_TRIPLETS];
    float squares = kernels->dot(y, y, book->dim);
    return sqrtf(squares) * book->inverse_sqrt_dim <= KVANT_HALF_MAX &&
           kvant_octopus_quantize(book, kernels, y, codes) <= KVANT_HALF_MAX;
}

void kvant_octopus_dequantize(const octopus_book *book, const uint32_t *codes, float scale,
                              float *y)
{
    for (uint32_t i = 0; i < book->n_triplets; i++) {
        float decoded[3];
        decode_triplet(&book->triplets, codes[i], scale, decoded);
        for (uint32_t j = 0; j < 3 && 3 * i + j < book->dim; j++)
            y[3 * i + j] = decoded[j];
    }
}
