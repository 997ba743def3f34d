/* attention_bound.c - softmax in double precision over the CPU decoder's rows, and how far from it attention
 * on the GPU may be.
 *
 * The bound is derived, not tuned. With u = 2^-11 (fp16), for one query head:
 *   delta   = scale (unit 2^-12 sum |y_t| + step_error s_t |q|_1) + rounding: the largest error of a score,
 *   where
 *             unit is the power of two above max |R q|, y_t the decoded key in rotated space (L1 norm), s_t
 *             its stored scale, step_error the largest distance of a codebook entry, or of a number of a
 *             quaternion, from the byte that stands for it;
 *   e^(2 delta) - 1 bounds the relative error of a probability;
 *   a value's weight is rounded to fp16: u relative, and 2^-25 of the largest weight absolute (subnormal);
 *   scales of groups of tokens of a channel multiply query numbers, which are rounded to fp16 again;
 *   those of groups of channels of a token multiply weights, which are rounded again; of hybrid groups
 *   without zero points, their products with the offset are rounded, u of them;
 *   the values' codebook error is step_error s_t a channel, sqrt(d) of it in the L2 norm, which rotations
 *   keep; levels of a trellis are bytes as they are;
 *   sums run in fp32 (2^-22 a step, tensor cores truncate) over numbers as large as their bias;
 *   levels of keys with a codebook of 6 bits are rounded to fp16: u of the number;
 *   what a centre of keys adds is a sum in fp32, and references are moved by it between matrices: 2^-19 of the
 *   sum of its products' magnitudes;
 *   a product with a page's own centre is rounded head_dim + 4 times: 2^-24 of the sum of magnitudes each;
 *   the output is rounded to its type.
 * Tile kernels round every number of a page to fp16 in the page's unit: u
 * of the number and 2^-23 of the unit (the number, its scale and its zero point may be subnormal, 2^-25 each),
 * and u of the offset of symmetric codes;
 * their weights are relative to the largest weight times unit.
 * Kernels of any head_dim (any/attention.cu) round uniform codes like tile kernels, in a unit of the scales of the
 * token. Of other codes they round the decoder's own numbers to fp16: u of the number and 2^-25 of the unit. The
 * unit is at most four times the row's largest number, and a number at most 8 units. A sketch is a product with a
 * rotation that is rounded to fp16, 2^-11 of every term: 2^-11 of its norm times the sum of a column's magnitudes, at
 * most sqrt(d) times the column's length. That is 1, of a Gaussian column less than 1.5 (5 sigma at head_dim 64). The
 * codes' numbers, which are at most the result and the sketch's share, are rounded once more.
 * What a centroid leaves is rounded before the sum: u of at most the row's and the centroid's number, and 2^-23 of a unit
 * 2^10 times the scale, below half of that.
 * Of any/direct.cuh, with u = 2^-11 and columns of a rotation M of length 1:
 *   sketch   S q is rounded instead, u of |S q|_1 norm <= sqrt(d) norm |q|_2, less than the above;
 *   tiers    keys: M, M q and levels are rounded: u |y| (|q|_1 + 2 |q|_2), as the length of |M| |q| is at most |q|_1.
 *            Values: level, page's sum and M: u (2 + sqrt(d)) |y|. Both are at most 3 u |y| per number;
 *   polar    7 factors and 7 products are rounded, u each of the number. Those below 2^-18 of the row's length are
 *            subnormal: 14 2^-29 of the length;
 *   rows     as they are. Weights have no unit: 2^-25 of the largest one, as those of open pages over theirs, which is
 *            at least 2^-7. */
#include "attention_fixture.h"

#include <math.h>

#include "../../src/base/half.h"
#include "../../src/codec/codec_internal.h"
#include "../../src/cuda/any/general_decode.h"
#include "../../src/cuda/params.h"

/* Which arithmetic: decode kernels, which have no units; tile kernels; kernels of any head_dim. */
typedef enum units_kind { NO_UNITS, PAGE_UNITS, ROW_UNITS } units_kind;

/* Chunks: a direction, a norm and their product are rounded to fp16, (1 + 2^-11)^3, and the direction
 * comes of a few fp32 operations; where they are subnormal the errors are 2^-25 of their units, which are
 * 32 and at most 6. */
#define CHUNK_RELATIVE (3.02 * 0x1p-11)
#define CHUNK_ABSOLUTE 0x1p-20

/* A unit times a secondary has components of the secondary, or half their sum with any signs. Bytes count
 * them in 128ths, up to 127. */
static double direction_error(const kvant_cuda_book *book)
{
    double top = 0;
    for (uint32_t i = 0; i < book->n_secondaries; i++) {
        double sum = 0;
        for (int k = 0; k < 4; k++) {
            sum += fabs(book->secondaries[i][k]);
            top = fmax(top, fabs(book->secondaries[i][k]));
        }
        top = fmax(top, sum / 2);
    }
    return fmax(0x1p-8, top - 127.0 / 128) + 0x1p-20;
}

/* The codec's tables, as the host has them. */
static const float *tables_of(const kvant_cuda_codec *codec)
{
    return codec->tables->host;
}

static bool has_chunks(const kvant_cuda_codec *codec)
{
    return kvant_cuda_has_chunks(&codec->params) ||
           codec->params.decoder == KVANT_CUDA_OCTOPUS_SPLITS ||
           codec->params.decoder == KVANT_CUDA_HQMQ_SIZES;
}

/* The largest distance of a codeword's number from its byte, which is made of the number as fp16. */
static double codeword_error(const kvant_cuda_codec *codec)
{
    const kvant_general_view *view = &codec->general.view;
    const float *codewords = tables_of(codec) + view->chunks.codewords;
    double worst = 0;
    for (uint32_t i = 0; i < 4 * view->chunks.n_codewords; i++) {
        const double half = kvant_half_to_float(kvant_half_from_float(codewords[i]));
        worst = fmax(worst, fabs(codewords[i] - fmin(rint(128 * half), 127) / 128));
    }
    return worst;
}

/* The largest distance of a number from what stands for it, for a scale of 1. */
static double step_error(const kvant_cuda_codec *codec)
{
    const kvant_cuda_params *p = &codec->params;
    const bool known = p->kind == KVANT_CUDA_HQMQ_S96R4 || p->kind == KVANT_CUDA_HQMQ_S192R6;
    double worst = known ? direction_error(&codec->book) : 0;
    if (p->decoder ==
        KVANT_CUDA_HQMQ_SIZES) /* pairs of different sizes have kernels of any sizes */
        worst = fmax(worst, codeword_error(codec));
    if (worst > 0)
        return worst * ((1 << codec->general.view.chunks.length_bits) - 1);
    const bool codebook =
        p->codes == KVANT_CUDA_CODES_CODEBOOK && p->kind != KVANT_CUDA_CODEBOOK_WIDE;
    for (uint32_t i = 0; codebook && i < 1u << p->bits; i++)
        worst = fmax(worst, fabs(p->values[i] - p->step * ((p->bytes[i / 4] >> 8 * (i % 4) & 255) -
                                                           (double)p->bias)));
    return worst;
}

/* The largest scale and zero point of a token, and powers of two above those of its page (for groups of
 * channels). */
typedef struct sizes {
    double scale, zero, page_scale, page_zero;
} sizes;

static double half_at(const kvant_cuda_params *p, const uint8_t *page, uint32_t i)
{
    return fabs(kvant_half_to_float(((const uint16_t *)(page + p->metadata_offset))[i]));
}

static void grow(const kvant_cuda_params *p, const uint8_t *page, uint32_t i, double *scale,
                 double *zero)
{
    const bool signed_scale = ((const uint16_t *)(page + p->metadata_offset))[i] >> 15,
               zeros =
                   p->hybrid ? signed_scale : p->codes == KVANT_CUDA_CODES_UNIFORM && !p->symmetric;
    *scale = fmax(*scale, half_at(p, page, i));
    *zero = fmax(*zero,
                 zeros ? half_at(p, page, p->n_scales + i) : fabs(p->offset) * half_at(p, page, i));
}

/* valid: tokens of the page that are there. */
static sizes sizes_of(const kvant_cuda_codec *codec, const uint8_t *page, uint32_t token,
                      uint32_t valid)
{
    const kvant_cuda_params *p = &codec->params;
    const uint32_t group = codec->any.group;
    sizes s = { 0, 0, 0x1p-14, 0x1p-14 };
    if (p->grouping == KVANT_CUDA_GROUP_TOKEN)
        grow(p, page, token, &s.scale, &s.zero);
    for (uint32_t j = 0; p->grouping == KVANT_CUDA_GROUP_TOKENS && j < p->head_dim; j++)
        grow(p, page, token / group * p->head_dim + j, &s.scale, &s.zero);
    for (uint32_t g = 0; p->grouping == KVANT_CUDA_GROUP_CHANNELS && g * group < p->head_dim; g++) {
        grow(p, page, g * 64 + token, &s.scale, &s.zero);
        for (uint32_t t = 0; t < valid; t++)
            grow(p, page, g * 64 + t, &s.page_scale, &s.page_zero);
    }
    s.page_scale *= 2;
    s.page_zero *= 2;
    return s;
}

typedef struct rows_of_page {
    float rows[64 * MAX_D];
    located at;
    uint32_t valid;
    double unit, resolution; /* of tile kernels */
} rows_of_page;

/* No tile kernels serve it. */
static bool is_any(const fixture *f)
{
    return kvant_cuda_needs_any(&f->cache.gpu_k->params) ||
           kvant_cuda_needs_any(&f->cache.gpu_v->params);
}

/* The largest number of a token's centroid. */
static double centroid_size(const kvant_cuda_codec *codec, const located *at, uint32_t token)
{
    kvant_general g = codec->general;
    g.tables = kvant_codec_get_view(at->codec)->tables;
    const float *centroid = general_centroid((general_team){ 0, 1, 0 }, &g, at->page, (int)token);
    double largest = 0;
    for (uint32_t j = 0; centroid && j < g.head_dim; j++)
        largest = fmax(largest, fabs(centroid[j]));
    return largest;
}

/* A decode kernel may. */
static bool may_decode(const fixture *f)
{
    const kvant_cuda_params *k = &f->cache.gpu_k->params, *v = &f->cache.gpu_v->params;
    return kvant_cuda_knows(k->head_dim) && (k->decoder || !kvant_cuda_needs_any(k)) &&
           (v->decoder || !kvant_cuda_needs_any(v));
}

/* Of any/: what a number of a rotated tile is wrong by beside 2^-11 of itself; length: of the row. */
static double rotated_error(const kvant_cuda_codec *codec, const located *at, uint32_t token,
                            double length)
{
    const kvant_general_view *view = &codec->general.view;
    if (at->open || !kvant_cuda_is_general(&codec->params))
        return 0;
    if (view->kind == KVANT_GENERAL_UNIFORM && view->uniform.clusters)
        return 1.5 * 0x1p-11 * (length + centroid_size(codec, at, token));
    if (view->kind == KVANT_GENERAL_POLAR)
        return 14 * 0x1p-29 * length;
    if (!view->sketched)
        return view->kind == KVANT_GENERAL_TIERS ? 3.01 * 0x1p-11 * length : 0;
    const double norm = kvant_half_to_float(
        ((const uint16_t *)((const uint8_t *)at->page + view->sketch_norms))[token]);
    return 0x1p-10 * 1.2533142 * norm * 1.5 * sqrt(codec->params.head_dim);
}

/* How often a number of any/ is rounded to fp16: codewords and radii before their product, and factors of polar numbers; of a
 * table of triplets directions, norms, scales and both products. */
static double roundings(const kvant_cuda_codec *codec, const located *at)
{
    const kvant_general_view *view = &codec->general.view;
    if (at->open || !kvant_cuda_is_general(&codec->params))
        return 1;
    if (codec->params.decoder == KVANT_CUDA_OCTOPUS_SPLITS)
        return 5.02;
    return view->sketched                           ? 2
           : view->kind == KVANT_GENERAL_DIRECTIONS ? 3.01
           : view->kind == KVANT_GENERAL_POLAR      ? 14.1
                                                    : 1;
}

/* What bytes of directions are wrong by, in kernels of any/. */
static double byte_error(const kvant_cuda_codec *codec, double error, const located *at,
                         uint32_t token)
{
    return at->open || codec->params.decoder != KVANT_CUDA_HQMQ_SIZES
               ? 0
               : error * half_at(&codec->params, at->page, token);
}

/* The arithmetic for a codec. */
static units_kind units_for(units_kind units, const kvant_cuda_codec *codec)
{
    return units == ROW_UNITS && codec->params.codes == KVANT_CUDA_CODES_UNIFORM ? PAGE_UNITS
                                                                                 : units;
}

/* The units of unpack.cuh, and of any/ for the scales of one token: a power of two above the page's scales, whose zero points are at most 2^23 times as
 * large. Zero points stand in the unit too and have to stay within fp16's 2^16, so the unit is 2^9 times that
 * power (2^14 for the zero point, another bit for the number). Symmetric codes of 5 to 7 bits have none: 2, and
 * numbers of at most 2^7. */
static double unit_of(const fixture *f, const kvant_cuda_codec *codec, const uint8_t *page,
                      uint32_t token, uint32_t valid)
{
    const kvant_cuda_params *p = &codec->params;
    const uint32_t n = p->codes == KVANT_CUDA_CODES_UNIFORM   ? p->n_scales
                       : p->codes == KVANT_CUDA_CODES_GENERAL ? 0
                                                              : 64;
    const uint32_t group = codec->any.group;
    const bool any = is_any(f);
    double top = 0;
    for (uint32_t i = 0; i < n; i++) {
        const bool tokens = p->grouping == KVANT_CUDA_GROUP_TOKENS;
        const uint32_t of = tokens ? i / p->head_dim * group : i % 64;
        if (of >= valid || (any && of != (tokens ? token / group * group : token)))
            continue;
        top = fmax(top, half_at(p, page, i));
        if (p->codes == KVANT_CUDA_CODES_UNIFORM && !p->symmetric)
            top = fmax(top, half_at(p, page, p->n_scales + i) * 0x1p-23);
    }
    const double above = fmax(top > 0 ? exp2(floor(log2(top)) + 1) : 0, 0x1p-24);
    switch (p->codes) {
    case KVANT_CUDA_CODES_CODEBOOK:
        return p->kind == KVANT_CUDA_CODEBOOK_WIDE ? 2 * above : 0x1p9 * above * p->step;
    case KVANT_CUDA_CODES_UNIFORM:
        return (p->bits > 4 && p->bits < 8 && p->symmetric && !any ? 2 : 0x1p9) * above;
    case KVANT_CUDA_CODES_TRELLIS: return p->memory == 8 ? 0x1p9 * above * p->step : above;
    case KVANT_CUDA_CODES_QUATERNIONS: return above * 0x1p-9;
    default: return above;
    }
}

/* What is rounded before the last product is in other units: the norm of a triplet is below 8, numbers of
 * quaternions are products of a direction times 2^15 and of a radius of at most 1, or times up to 2^12 / 2^-9. */
static double length_range(const kvant_cuda_params *p)
{
    return p->codes == KVANT_CUDA_CODES_TRIPLETS      ? 8
           : p->codes == KVANT_CUDA_CODES_QUATERNIONS ? 0x1p20
                                                      : 1;
}

/* Decodes the page that holds token t when t is its first. */
static const float *row_at(const fixture *f, kvant_role role, uint32_t b, int32_t t, uint32_t kv,
                           rows_of_page *page)
{
    uint32_t d = f->c->head_dim;
    int32_t left = f->c->lengths[b] - t;
    if (t % 64 == 0) {
        page->at = locate(f, role, b, t, kv);
        page->valid = left < 64 ? (uint32_t)left : 64;
        kvant_codec_decode(page->at.codec, NULL, page->at.page, 0, page->valid, page->rows, d);
    }
    const kvant_cuda_codec *codec = role == KVANT_ROLE_K ? f->cache.gpu_k : f->cache.gpu_v;
    if (t % 64 == 0 || is_any(f)) {
        page->unit =
            page->at.open ? 1 : unit_of(f, codec, page->at.page, (uint32_t)t % 64, page->valid);
        page->resolution = page->at.open ? 0 : 0x1p-23 * page->unit * length_range(&codec->params);
    }
    return page->rows + (uint32_t)t % 64 * d;
}

/* The largest code of a kind, with what it is too large by before a bias or a zero point is taken off; of
 * chunks the largest number for a scale of 1. */
static double largest_code(const kvant_cuda_codec *codec)
{
    const kvant_cuda_params *p = &codec->params;
    const kvant_general_view *view = &codec->general.view;
    const uint32_t largest = (1u << view->chunks.length_bits) - 1;
    if (has_chunks(codec))
        return view->kind == KVANT_GENERAL_TRIPLETS ? tables_of(codec)[view->chunks.norm + largest]
                                                    : (float)largest;
    return p->codes == KVANT_CUDA_CODES_CODEBOOK || p->codes == KVANT_CUDA_CODES_TRELLIS
               ? 255 * p->step
               : p->levels * 2 + 2;
}

/* A query row. */
typedef struct query {
    uint32_t b, token, head;
} query;

/* What is added to a score, -INFINITY where the token is not seen. */
static double bias_of(const fixture *f, const query *at, int32_t t)
{
    const attention_problem *p = &f->p;
    const int32_t position = position_of(f, at->b, at->token);
    if (f->hidden && f->hidden[at->b * f->blocks_per_row + (uint32_t)t / 64])
        return -INFINITY;
    if ((p->causal && t > position) || (p->window && position - t >= (int32_t)p->window))
        return -INFINITY;
    const double slope = slope_of(f, at->head);
    if (p->mask)
        return slope *
               kvant_half_to_float(
                   f->mask[(size_t)row_of(f, at->b, at->token) * f->mask_stride + (uint32_t)t]);
    return p->max_bias > 0 ? slope * (t - position) : 0;
}

/* Softcap, mask, ALiBi, hidden tokens. A softcap does not enlarge errors, except by 2^-20 of itself; a
 * bias is rounded to fp32 a few times. Returns the additional error of the score. */
static double change_score(const fixture *f, const query *at, int32_t t, double *score)
{
    double error = 0;
    if (f->p.softcap > 0) {
        *score = f->p.softcap * tanh(*score / f->p.softcap);
        error += f->p.softcap * 0x1p-20;
    }
    const double bias = bias_of(f, at, t);
    *score += bias;
    return isinf(bias) ? 0 : error + fabs(bias) * 0x1p-20;
}

/* A row as the GPU multiplies it, and what its keys' centre adds to its scores. */
typedef struct transformed {
    float q[MAX_D], rotated[MAX_D];
    double q1, unit, bias, bias_size;
} transformed;

/* For keys of number m. Rows are decoded without scale, so queries get them. */
static void transform(const fixture *f, const query *at, uint32_t kv, uint32_t m, transformed *r)
{
    const uint32_t d = f->c->head_dim;
    const float *given =
        f->q +
        (((size_t)f->q_numbers[m] * f->n_rows + row_of(f, at->b, at->token)) * f->c->n_heads +
         at->head) *
            d;
    const float *center =
        f->k_center ? f->k_center + ((size_t)m * f->c->n_kv_heads + kv) * d : NULL;
    double largest = 0;
    *r = (transformed){ 0 };
    for (uint32_t j = 0; j < d; j++) {
        r->q[j] = f->k_scale ? given[j] * f->k_scale[kv * d + j] : given[j];
        r->bias += center ? (double)given[j] * center[j] : 0;
        r->bias_size += center ? fabs((double)given[j] * center[j]) : 0;
    }
    kvant_codec_transform_query(f->cache.k, NULL, r->q, r->rotated);
    for (uint32_t j = 0; j < d; j++) {
        largest = fmax(largest, fabs(r->rotated[j]));
        r->q1 += fabs(r->rotated[j]);
    }
    r->unit = exp2(floor(log2(largest)) + 1);
}

/* What a page's own centre adds to the scores of a row; *error: how far the GPU may be from it. */
static double page_bias(const fixture *f, const query *at, uint32_t kv, int32_t t, double *error)
{
    const uint32_t d = f->c->head_dim;
    double size;
    const double bias = turned_product(
        &f->turning, at->b * f->blocks_per_row + (uint32_t)t / 64, kv,
        f->plain_q + ((size_t)row_of(f, at->b, at->token) * f->c->n_heads + at->head) * d, &size);
    *error = (d + 4) * 0x1p-24 * size;
    return bias;
}

/* Fills scores; returns the largest error of one that is seen. */
static double score_errors(const fixture *f, const query *at, units_kind wanted, uint32_t kv,
                           double *scores)
{
    static transformed rows[KVANT_CUDA_MOST_MATRICES];
    const units_kind units = units_for(wanted, f->cache.gpu_k);
    const bool tiles = units == PAGE_UNITS;
    const uint32_t b = at->b;
    static rows_of_page page;
    const kvant_cuda_codec *codec = f->cache.gpu_k;
    const kvant_cuda_params *p = &codec->params;
    uint32_t d = f->c->head_dim;
    double scale = 1 / sqrtf((float)d), delta = 0, k_error = step_error(f->cache.gpu_k),
           of_page = 0, page_error = 0;
    float y[MAX_D];
    for (uint32_t m = 0; m < f->n_matrices; m++)
        transform(f, at, kv, m, &rows[m]);
    for (int32_t t = 0; t < f->c->lengths[b]; t++) {
        const transformed *own = &rows[matrix_of(f, b, t)];
        const float *q = own->q, *rotated = own->rotated;
        const double q1 = own->q1, unit = own->unit;
        const float *row = row_at(f, KVANT_ROLE_K, b, t, kv, &page);
        if (f->plain_q && t % 64 == 0)
            of_page = page_bias(f, at, kv, t, &page_error);
        double sum = 0, y1 = 0, of_scales = 0, qy = 0, largest = 0, squares = 0;
        kvant_codec_transform_query(f->cache.k, NULL, row, y);
        for (uint32_t j = 0; j < d; j++) {
            sum += (double)q[j] * row[j];
            y1 += fabs(y[j]);
            squares += (double)y[j] * y[j];
            qy += fabs((double)rotated[j] * y[j]);
            largest = fmax(largest, fabs(y[j]));
        }
        scores[t] = scale * (sum + own->bias + of_page);
        const double plain = fabs(scores[t]),
                     more = change_score(f, at, t, &scores[t]) +
                            scale * (own->bias_size * 0x1p-19 + page_error);
        if (isinf(scores[t]))
            continue;
        if (units == ROW_UNITS) {
            of_scales = (roundings(codec, &page.at) * 0x1p-11 + d / 16 * 0x1p-22) * qy +
                        (0x1p-23 * largest +
                         rotated_error(codec, &page.at, (uint32_t)t % 64, sqrt(squares)) +
                         byte_error(codec, k_error, &page.at, (uint32_t)t % 64)) *
                            q1;
            delta = fmax(delta, scale * ((unit * 0x1p-12 + f->query_error) * y1 + of_scales) +
                                    plain * 0x1p-20 + more);
            continue;
        }
        sizes s = page.at.open ? (sizes){ 0 }
                               : sizes_of(codec, page.at.page, (uint32_t)t % 64, page.valid);
        if (p->grouping == KVANT_CUDA_GROUP_TOKENS && !tiles) /* rounded to fp16 once more */
            of_scales = largest_code(codec) * (0x1p-11 * q1 * s.scale + 0x1p-25 * unit * d);
        of_scales += p->hybrid ? 0x1p-11 * s.zero * q1 : 0;
        if (has_chunks(codec) && !page.at.open)
            of_scales = CHUNK_RELATIVE * qy + CHUNK_ABSOLUTE * s.scale * q1;
        if (p->decoder == KVANT_CUDA_CODEBOOK6 && !tiles && !page.at.open)
            of_scales += 0x1p-11 * qy;
        if (tiles && !page.at.open)
            of_scales +=
                0x1p-11 * qy + page.resolution * q1 + (p->symmetric ? 0x1p-11 * s.zero * q1 : 0);
        /* last term: fp32 sums of codes of up to 255 with their bias, and exponents of base 2 at most 2^7 */
        delta = fmax(delta,
                     scale * ((unit * 0x1p-12 + f->query_error) * y1 + k_error * s.scale * q1 +
                              of_scales +
                              (d / 16) * 0x1p-22 * q1 * (s.scale * 255 + s.zero + fabs(y1 / d))) +
                         plain * 0x1p-20 + more);
    }
    return delta;
}

/* Softmax over the decoded rows of a sequence for one query row, and the bound of the head comment. */
static void compute_row(const fixture *f, const query *at, units_kind wanted, reference *r)
{
    const units_kind units = units_for(wanted, f->cache.gpu_v);
    const bool tiles = units == PAGE_UNITS;
    const uint32_t b = at->b, head = at->head;
    static rows_of_page page;
    const attention_case *c = f->c;
    const kvant_cuda_codec *codec = f->cache.gpu_v;
    const kvant_cuda_params *p = &codec->params;
    uint32_t d = c->head_dim, kv = head / (c->n_heads / c->n_kv_heads);
    int32_t n = c->lengths[b];
    double *scores = malloc((size_t)n * sizeof *scores), top = -INFINITY;
    const double bytes_error = step_error(f->cache.gpu_v),
                 v_error = units == ROW_UNITS ? 0 : bytes_error;
    double delta = score_errors(f, at, wanted, kv, scores);
    for (int32_t t = 0; t < n; t++)
        top = fmax(top, scores[t]);
    if (isinf(top)) { /* sees nothing */
        *r = (reference){ .lse = f->sinks ? f->sinks[head] : -INFINITY, .lse_bound = 0x1p-20 * 8 };
        free(scores);
        return;
    }
    double total = 0, norms = 0, rounded = 0, summed = 0, largest = 0, small = 0, small_zero = 0,
           weighted_scale = 0, tile = 0;
    double root = sqrt(d), code = largest_code(codec);
    memset(r->out, 0, sizeof r->out);
    for (int32_t t = 0; t < n; t++) {
        const float *row = row_at(f, KVANT_ROLE_V, b, t, kv, &page);
        if (isinf(scores[t]))
            continue;
        double w = exp(scores[t] - top), norm = 0;
        for (uint32_t j = 0; j < d; j++) {
            r->out[j] += w * row[j];
            norm += (double)row[j] * row[j];
        }
        total += w;
        norms += w * sqrt(norm);
        if (units == ROW_UNITS) { /* the unit is between norm / (8 root) and four times the norm */
            rounded += (1 + roundings(codec, &page.at)) * w * sqrt(norm);
            tile += w *
                    (rotated_error(codec, &page.at, (uint32_t)t % 64, sqrt(norm)) +
                     byte_error(codec, bytes_error, &page.at, (uint32_t)t % 64)) *
                    root;
            summed += w * sqrt(norm);
            small += 8 * root + (page.at.open ? sqrt(norm) : 0);
            small_zero += codec->general.view.kind == KVANT_GENERAL_RAW ? sqrt(norm) : 0;
            largest = fmax(largest, fmax(4 * w * sqrt(norm), page.at.open ? w * 0x1p-7 : 0));
            tile += w * (0x1p-23 * sqrt(norm) + 0x1p-64) * root;
            continue;
        }
        if (tiles) {
            rounded += (page.at.open ? 1 : 2) * w * sqrt(norm);
            small += sqrt(norm) / page.unit;
            largest = fmax(largest, w * page.unit);
            tile += w * page.resolution * root;
            const sizes s = page.at.open
                                ? (sizes){ 0 }
                                : sizes_of(codec, page.at.page, (uint32_t)t % 64, page.valid);
            weighted_scale += w * s.scale;
            summed += w * (s.scale * code + s.zero) * root + w * sqrt(norm);
            tile += p->symmetric ? w * 0x1p-11 * s.zero * root : 0;
            continue;
        }
        if (page.at.open) { /* weights are relative to the page's largest */
            rounded += w * sqrt(norm);
            summed += w * sqrt(norm);
            small_zero += sqrt(norm);
            largest = fmax(largest, w * 0x1p-16);
            continue;
        }
        sizes s = sizes_of(codec, page.at.page, (uint32_t)t % 64, page.valid);
        weighted_scale += w * s.scale;
        summed += w * (s.scale * code + s.zero) * root;
        rounded += p->hybrid ? w * s.zero * root : 0;
        summed += has_chunks(codec) ? w * sqrt(norm) : 0; /* outliers are larger than codes */
        if (p->grouping == KVANT_CUDA_GROUP_TOKEN) {
            rounded += w * s.scale * code * root;
            small += code * root;
            largest = fmax(largest, w * s.scale);
        } else if (p->grouping == KVANT_CUDA_GROUP_TOKENS) { /* weights without a scale */
            rounded += w * (s.scale * code + s.zero) * root;
            small_zero += (s.scale * code + s.zero) * root;
        } else { /* weight, scale and product are rounded, zero points too */
            rounded += w * (2 * s.scale * code + s.zero) * root;
            small += (3 * code + s.zero / s.page_scale) * root;
            summed +=
                w * s.page_zero * 0x1p-3 * root; /* 2^-25 for a zero point, as 2^-22 of an eighth */
            largest = fmax(largest, w * s.page_scale);
        }
    }
    /* a sink is a token without a value; the centre belongs to those that have one */
    const double seen = total;
    total += f->sinks ? exp(f->sinks[head] - top) : 0;
    double factor = 1, center_norm = 0; /* the largest */
    for (uint32_t j = 0; j < d; j++) {
        double own = f->v_scale ? f->v_scale[kv * d + j] : 1;
        const double center = f->center ? f->center[kv * d + j] : 0;
        r->out[j] = own * r->out[j] / total + seen / total * center;
        center_norm += center * center;
        factor = fmax(factor, own);
    }
    const double of_chunks = has_chunks(codec) && units != ROW_UNITS
                                 ? CHUNK_RELATIVE * norms + CHUNK_ABSOLUTE * weighted_scale * root
                                 : 0;
    double norm = 0, growth = exp(2 * delta) - 1,
           rounding = c->type == KVANT_CUDA_F32   ? 0x1p-22
                      : c->type == KVANT_CUDA_F16 ? 0x1p-11
                                                  : 0x1p-8;
    for (uint32_t j = 0; j < d; j++)
        norm += r->out[j] * r->out[j];
    r->lse = top + log(total);
    r->lse_bound = delta + 0x1p-20 * (1 + fabs(r->lse));
    r->bound =
        (growth * norms + 0x1p-11 * rounded + 0x1p-25 * (largest * small + small_zero) +
         v_error * weighted_scale * root + of_chunks + tile + (n / 16 + 16) * 0x1p-22 * summed) /
            total * factor +
        (f->sinks ? growth * sqrt(center_norm) : 0) + (rounding + f->output_error) * sqrt(norm) +
        (c->type == KVANT_CUDA_F16 ? 0x1p-25 * root : 0);
    free(scores);
}

void compute_reference(const fixture *f, uint32_t b, uint32_t token, uint32_t head, reference *r)
{
    *r = (reference){ .lse = f->sinks ? f->sinks[head] : -INFINITY };
    if (f->c->lengths[b] <= 0 || f->p.no_blocks)
        return;
    const query at = { b, token, head };
    *r = (reference){ 0 };
    /* the widest of those that may have served the problem: a library may lack decode kernels */
    for (units_kind units = NO_UNITS; units <= ROW_UNITS; units++) {
        reference own;
        if (is_any(f) && units != ROW_UNITS && (units != NO_UNITS || !may_decode(f)))
            continue;
        compute_row(f, &at, units, &own);
        own.bound = fmax(own.bound, r->bound);
        own.lse_bound = fmax(own.lse_bound, r->lse_bound);
        *r = own;
    }
}

void check_head(fixture *f, const void *out, const float *lse, uint32_t b, uint32_t token,
                uint32_t head)
{
    const attention_case *c = f->c;
    const uint32_t d = c->head_dim;
    const size_t row = (size_t)row_of(f, b, token) * c->n_heads + head, at = row * d;
    reference r;
    double error = 0;
    compute_reference(f, b, token, head, &r);
    for (uint32_t j = 0; j < d; j++) {
        double difference = from_type(out, at + j, c->type) - r.out[j];
        error += difference * difference;
    }
    error = sqrt(error);
    if (r.bound > 0)
        f->worst = fmax(f->worst, error / r.bound);
    if (!(error <= r.bound))
        fail_msg("%s / %s, head_dim %u, sequence %u of %d tokens, query token %u, head %u: error "
                 "%g, bound %g",
                 c->k_spec, c->v_spec, d, b, c->lengths[b], token, head, error, r.bound);
    if (lse && !(lse[row] == r.lse || fabs(lse[row] - r.lse) <= r.lse_bound))
        fail_msg("%s, head_dim %u, sequence %u, query token %u, head %u: log-sum-exp %g, reference "
                 "%g, bound %g",
                 c->k_spec, d, b, token, head, lse[row], r.lse, r.lse_bound);
}
