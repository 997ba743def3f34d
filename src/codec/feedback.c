/* feedback.c - see feedback.h and format.md, "Feedback". Owns no codes: a family calls
 * kvant_feedback_quantize in its quantiser.
 *
 * Without feedback the error of a row has the same size in all directions. Then the symmetric S
 * before the rotation should make tr(S^-2 Q) tr(S^2 K) small (calibration/moments.c). Feedback
 * steers errors, as GPTQ and QuIP steer the errors of weights. The loss then behaves as
 * tr(H^(1/2))^2 / d instead of tr(H), with H = S^-1 Q S^-1. So a weaker S is best, which stretches
 * keys less. Take the coordinates in which W K W = W^-1 Q W^-1 = diag(m). There every S^2 = W
 * diag(m)^(s - 1) W makes diag(m)^s of the second moment of keys, and H becomes diag(m)^(2 - s). */
#include "feedback.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "../math/spd.h"

/* Parts of the mean that are added to the diagonals of Q, as when W was made, and of H. Without
 * them the steering would depend on directions that the calibration's text never used. */
#define QUERY_FLOOR 3e-4
#define LOSS_FLOOR 1e-2

/* A scale is between half and twice the scale for the row's length. Rows like the calibration's
 * rows stay within a fifth of it. */
#define MAX_RATIO 2.0f

/* Parts of the Frobenius norm on the diagonal of S, so that its inverse is exact enough in binary32
 * (calibration/moments.c does the same to W). */
#define SMALLEST 0x1p-10

static void add_to_diagonal(double *m, size_t d, double number)
{
    for (size_t i = 0; i < d; i++)
        m[i * d + i] += number;
}

/* Computes S into s. With M = W^-1 Q W^-1, S^2 is W M^(-1/2) W. This is the exponent 1/2 in the
 * text above. S is scaled so that keys keep the mean length that they have after W, which tr M
 * gives. room: 3 d^2 numbers. */
static kvant_status make_matrix(uint32_t n, const double *w, const double *inverse, const double *q,
                                double *s, double *room)
{
    size_t d = n, size = d * d;
    double *m = room, *root = room + size, *scratch = room + 2 * size;
    kvant_spd_sandwich(n, inverse, q, scratch, m);
    double before = kvant_trace((uint32_t)d, m);
    KVANT_FORWARD(kvant_spd_roots(n, m, root, m));
    double factor = sqrt(before / kvant_trace((uint32_t)d, root));
    kvant_spd_sandwich(n, w, m, scratch, s);
    KVANT_FORWARD(kvant_spd_roots(n, s, s, NULL));
    for (size_t i = 0; i < size; i++)
        s[i] *= factor;
    add_to_diagonal(s, d, SMALLEST * kvant_frobenius(n, s));
    return KVANT_OK;
}

/* Computes H in the order of the codes: B Q B^T with B = R S^-1, whose columns are in weights.
 * room: d^2 numbers. */
static void make_loss(size_t d, const float *key_transform, const double *q, double *room,
                      double *h)
{
    memset(room, 0, d * d * sizeof *room);
    memset(h, 0, d * d * sizeof *h);
    for (size_t a = 0; a < d; a++)
        for (size_t i = 0; i < d; i++)
            for (size_t j = 0; j < d; j++)
                room[a * d + j] += (double)key_transform[i * d + a] * q[i * d + j];
    for (size_t a = 0; a < d; a++)
        for (size_t j = 0; j < d; j++)
            for (size_t b = 0; b <= a; b++)
                h[a * d + b] += room[a * d + j] * (double)key_transform[j * d + b];
    for (size_t a = 0; a < d; a++)
        for (size_t b = 0; b < a; b++)
            h[b * d + a] = h[a * d + b];
    add_to_diagonal(h, d, LOSS_FLOOR * kvant_trace((uint32_t)d, h) / (double)d);
}

static void fill(kvant_feedback *feedback, const double *lower, const double *pivots, double scale)
{
    size_t d = feedback->n;
    for (size_t j = 0; j < d; j++) {
        feedback->pivots[j] = (float)(pivots[j] * scale);
        for (size_t i = j + 1; i < d; i++)
            feedback->columns[j * feedback->stride + i] = (float)lower[i * d + j];
    }
}

/* room: 5 d^2 numbers; on entry the first d^2 hold Q. */
static kvant_status build(kvant_codec *codec, const double *w, double *inverse, double *room)
{
    uint32_t n = codec->info.head_dim;
    size_t d = n, size = d * d;
    double *q = room, *s = room + size, *rest = room + 2 * size;
    KVANT_FORWARD(make_matrix(n, w, inverse, q, s, rest));
    KVANT_FORWARD(kvant_spd_inverse(n, s, inverse));
    KVANT_FORWARD(kvant_transform_set_matrix(&codec->transform, s, inverse));
    double *h = s, *lower = inverse, *pivots = rest;
    make_loss(d, codec->transform.key_transform + size, q, rest, h);
    double scale = (double)d / kvant_trace((uint32_t)d, h);
    KVANT_FORWARD(kvant_spd_unit_lower(n, h, lower, pivots));
    fill(codec->feedback, lower, pivots, scale);
    return KVANT_OK;
}

kvant_status kvant_feedback_create(kvant_codec *codec, const double *w, double *inverse,
                                   const float *moment, const kvant_error *error)
{
    size_t d = codec->info.head_dim, stride = (d + 15) / 16 * 16;
    double *room = kvant_alloc(5 * d * d, sizeof *room);
    codec->feedback = kvant_alloc(1, sizeof *codec->feedback + d * stride * sizeof(float));
    kvant_status status = room && codec->feedback ? KVANT_OK : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        codec->feedback->n = (uint32_t)d;
        codec->feedback->stride = (uint32_t)stride;
        for (size_t i = 0; i < d * d; i++)
            room[i] = moment[i];
        status = kvant_spd_regularise((uint32_t)d, room, QUERY_FLOOR)
                     ? build(codec, w, inverse, room)
                     : KVANT_ERR_ARGUMENT;
    }
    kvant_free(room);
    if (status == KVANT_OK || status == KVANT_ERR_MEMORY)
        return status;
    return kvant_fail(error, KVANT_ERR_FORMAT,
                      "the second moments of queries in the calibration file cannot be used for "
                      "feedback: make it again with kvant calibrate");
}

float kvant_feedback_quantize(const kvant_feedback *feedback, const kvant_codebook *book,
                              const kvant_kernels *kernels, const float *y, uint8_t *codes)
{
    float z[KVANT_MAX_HEAD_DIM];
    kvant_feedback_sums sums;
    float length = sqrtf(kernels->dot(y, y, feedback->n)) * book->inverse_sqrt_dim;
    float scale = kvant_half_to_float(kvant_half_from_float(length)),
          inverse = scale > 0 ? 1 / scale : 0;
    for (uint32_t i = 0; i < feedback->n; i++)
        z[i] = y[i] * inverse;
    kernels->feedback_codes(feedback, z, book->thresholds, book->values, book->bits, codes, &sums);
    if (!book->unbiased || !(sums.product > 0))
        return scale;
    float ratio = sums.own / sums.product;
    return scale * (ratio > MAX_RATIO ? MAX_RATIO : ratio < 1 / MAX_RATIO ? 1 / MAX_RATIO : ratio);
}

bool kvant_feedback_fits(const kvant_codebook *book, const kvant_kernels *kernels, const float *y)
{
    float squares = kernels->dot(y, y, book->dim);
    return sqrtf(squares) * book->inverse_sqrt_dim <= KVANT_HALF_MAX / MAX_RATIO;
}
