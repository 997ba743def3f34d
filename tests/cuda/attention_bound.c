/* attention_bound.c - softmax in double precision over the rows that the CPU decodes, and the bound
 * on how far attention on the GPU may be from it.
 *
 * The bound is derived, not tuned. In what follows, u = 2^-11 (fp16), for one query head.
 *
 * The largest error of a score is delta = scale (unit 2^-12 sum |y_t| + step_error s_t |q|_1) +
 * rounding. Here unit is the power of two above max |R q|, y_t is the decoded key in rotated space
 * (L1 norm), and s_t is the key's stored scale. The constant step_error is the largest distance
 * between an entry of a codebook, or a number of a quaternion, and the byte that stands for it. The
 * relative error of a probability is at most e^(2 delta) - 1.
 *
 * A value's weight is rounded to fp16: by u of itself, and by 2^-25 of the largest weight if it is
 * subnormal.
 *
 * Scales of groups of tokens in a channel multiply query numbers, which are rounded to fp16 again.
 * Scales of groups of channels in a token multiply weights, which are rounded again. In hybrid
 * groups without zero points, the products of scale and offset are rounded by u of themselves.
 *
 * The codebook error of values is step_error s_t per channel, and sqrt(d) times that in the L2
 * norm, which rotations keep. Levels of a trellis are bytes and have no such error. Levels of keys
 * with a codebook of 6 bits are rounded to fp16: by u of the number.
 *
 * Sums run in fp32 over numbers as large as their bias. They err by 2^-22 per step, because tensor
 * cores truncate.
 *
 * A centre of keys adds a sum in fp32 to scores. References move by it between matrices. It errs by
 * 2^-19 of the sum of its products' magnitudes. A product with a page's own centre errs by
 * (2 head_dim + 32) 2^-24 of the sum of magnitudes, which is at least each factor of the row. The
 * kernel for many rows splits factors and phases into two halves. Each then errs by 2^-22 of itself
 * and by 2^-25 of a unit, which is at most twice the largest one. The product of both lower halves
 * is left out, and a sum of 3 head_dim / 16 steps follows. The output is rounded to its type.
 *
 * Tile kernels round every number of a page to fp16 in the page's unit. That errs by u of the
 * number and by 2^-23 of the unit, because the number, its scale and its zero point may be
 * subnormal (2^-25 each). It also errs by u of the offset of symmetric codes. Weights of tile
 * kernels are relative to the largest weight times unit.
 *
 * Kernels of any head_dim (any/attention.cu) round uniform codes like tile kernels, in a unit of
 * the token's scales. They round the decoder's numbers of all remaining codes to fp16: by u of the
 * number and 2^-25 of the unit. The unit is at most four times the row's largest number, and a
 * number is at most 8 units.
 *
 * A sketch is a product with a rotation that is rounded to fp16, 2^-11 of every term. So it errs by
 * 2^-11 of its norm times the sum of a column's magnitudes, which is at most sqrt(d) times the
 * column's length. That length is 1. For a Gaussian column it is less than 1.5 (5 sigma at head_dim
 * 64). The codes' numbers, which are at most the result and the sketch's share, are rounded once
 * more.
 *
 * Tiers in papers/direct.cuh, where columns of a rotation M have length 1: for keys, M, M q and
 * levels are rounded, by u |y| (|q|_1 + 2 |q|_2), because the length of |M| |q| is at most |q|_1.
 * For values, the level, the page's sum and M are rounded, by u (2 + sqrt(d)) |y|. Both are at most
 * 3 u |y| per number. */
#include "attention_errors.h"

/* The arithmetic of kernels: decode kernels have no units, tile kernels have a unit per page,
 * kernels of any head_dim a unit per row. */
typedef enum units_kind { NO_UNITS, PAGE_UNITS, ROW_UNITS } units_kind;

/* Chunks: a direction, a norm and their product are rounded to fp16, which makes (1 + 2^-11)^3. The
 * direction comes from some fp32 operations. Subnormal directions and norms err by 2^-25 of their
 * units, which are 32 and at most 6. */
#define CHUNK_RELATIVE (3.02 * 0x1p-11)
#define CHUNK_ABSOLUTE 0x1p-20

/* A token of a sequence and kv head, as the bound needs it. */
typedef struct token_row {
    const float *row;
    const float *rotated; /* of keys */
    located at;
    uint32_t valid;          /* tokens of its page */
    double unit, resolution; /* of tile kernels */
    double sum, largest;     /* of the magnitudes of a key's rotated numbers */
    double length;           /* of a rotated key, or of a value */
    bool has_sizes;
    sizes s; /* zeros in exact pages */
} token_row;

/* Decoding takes longer than the sums of a query row, so a sequence's rows are decoded once, at the
 * first query row that reads them. */
struct decoded_rows {
    float *rows, *rotated;
    token_row *tokens;
};

/* Whether no tile kernel supports the codecs. */
static bool is_any(const fixture *f)
{
    return kvant_cuda_needs_any(&f->cache.gpu_k->params) ||
           kvant_cuda_needs_any(&f->cache.gpu_v->params);
}

/* Whether a decode kernel may compute the problem. */
static bool may_decode(const fixture *f)
{
    const kvant_cuda_params *k = &f->cache.gpu_k->params, *v = &f->cache.gpu_v->params;
    return kvant_cuda_knows(k->head_dim) && (k->decoder || !kvant_cuda_needs_any(k)) &&
           (v->decoder || !kvant_cuda_needs_any(v));
}

/* In any/: the error of a number in a rotated tile, beyond 2^-11 of itself. length: of the row. */
static double rotated_error(const kvant_cuda_codec *codec, const located *at, uint32_t token,
                            double length)
{
    const kvant_general_view *view = &codec->general.view;
    if (at->open || !kvant_cuda_is_general(&codec->params))
        return 0;
    if (!view->sketched)
        return view->kind == KVANT_GENERAL_TIERS ? 3.01 * 0x1p-11 * length : 0;
    const double norm = kvant_half_to_float(
        ((const uint16_t *)((const uint8_t *)at->page + view->sketch_norms))[token]);
    return 0x1p-10 * 1.2533142 * norm * 1.5 * sqrt(codec->params.head_dim);
}

/* How often a number of any/ is rounded to fp16. Codewords and radii are rounded before their
 * product. */
static double roundings(const kvant_cuda_codec *codec, const located *at)
{
    const kvant_general_view *view = &codec->general.view;
    if (at->open || !kvant_cuda_is_general(&codec->params))
        return 1;
    const bool words = view->kind == KVANT_GENERAL_DIRECTIONS && !view->chunks.pool;
    return view->sketched ? 2 : words ? 3.01 : 1;
}

/* The arithmetic that is used for a codec. */
static units_kind units_for(units_kind units, const kvant_cuda_codec *codec)
{
    return units == ROW_UNITS && codec->params.codes == KVANT_CUDA_CODES_UNIFORM ? PAGE_UNITS
                                                                                 : units;
}

/* The unit of unpack.cuh, and of any/ for the scales of one token.
 *
 * It is a power of two above the page's scales, whose zero points are at most 2^23 times as large.
 * Zero points are in this unit, too, and have to stay below fp16's 2^16. So the unit is 2^9 times
 * that power: 2^14 for the zero point, and another bit for the number. Symmetric codes of 5 to 7
 * bits have no zero points. Their factor is 2, and numbers are at most 2^7. */
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
    case KVANT_CUDA_CODES_TRELLIS: return 0x1p9 * above * p->step;
    case KVANT_CUDA_CODES_QUATERNIONS: return above * 0x1p-9;
    default: return above;
    }
}

/* Numbers that are rounded before the last product are in other units. The norm of a triplet is
 * below 8. A number of a quaternion is a direction times 2^15. It is multiplied by a radius of at
 * most 1, or by a factor of up to 2^12 / 2^-9. */
static double length_range(const kvant_cuda_params *p)
{
    return p->codes == KVANT_CUDA_CODES_TRIPLETS      ? 8
           : p->codes == KVANT_CUDA_CODES_QUATERNIONS ? 0x1p20
                                                      : 1;
}

static void rotate_key(const fixture *f, token_row *token, float *y)
{
    kvant_codec_transform_query(f->cache.k, NULL, token->row, y);
    token->rotated = y;
    for (uint32_t j = 0; j < f->c->head_dim; j++) {
        token->sum += fabs(y[j]);
        token->largest = fmax(token->largest, fabs(y[j]));
    }
}

static void decode_rows(const fixture *f, kvant_role role, uint32_t b, uint32_t kv,
                        struct decoded_rows *to)
{
    const kvant_cuda_codec *codec = role == KVANT_ROLE_K ? f->cache.gpu_k : f->cache.gpu_v;
    const uint32_t n = (uint32_t)f->c->lengths[b], d = f->c->head_dim;
    *to = (struct decoded_rows){ .rows = malloc((size_t)n * d * sizeof(float)),
                                 .rotated = role == KVANT_ROLE_K
                                                ? malloc((size_t)n * d * sizeof(float))
                                                : NULL,
                                 .tokens = calloc(n, sizeof *to->tokens) };
    for (uint32_t t = 0; t < n; t++) {
        token_row *token = &to->tokens[t];
        float *row = to->rows + (size_t)t * d;
        *token = t % 64 == 0 ? (token_row){ .at = locate(f, role, b, (int32_t)t, kv),
                                            .valid = n - t < 64 ? n - t : 64 }
                             : (token_row){ .at = token[-1].at, .valid = token[-1].valid };
        token->row = row;
        if (t % 64 == 0)
            kvant_codec_decode(token->at.codec, NULL, token->at.page, 0, token->valid, row, d);
        if (to->rotated)
            rotate_key(f, token, to->rotated + (size_t)t * d);
        double squares = 0;
        for (uint32_t j = 0; j < d; j++) {
            const double x = token->rotated ? token->rotated[j] : row[j];
            squares += x * x;
        }
        token->length = sqrt(squares);
        token->unit = token->at.open
                          ? 1
                          : unit_of(f, codec, token->at.page, is_any(f) ? t % 64 : 0, token->valid);
        token->resolution =
            token->at.open ? 0 : 0x1p-23 * token->unit * length_range(&codec->params);
    }
}

/* Token t of a sequence. */
static token_row *row_at(fixture *f, kvant_role role, uint32_t b, int32_t t, uint32_t kv)
{
    if (!f->decoded)
        f->decoded = calloc(2 * (size_t)f->c->batch * f->c->n_kv_heads, sizeof *f->decoded);
    struct decoded_rows *of =
        &f->decoded[((role == KVANT_ROLE_V) * f->c->batch + b) * f->c->n_kv_heads + kv];
    if (!of->tokens)
        decode_rows(f, role, b, kv, of);
    return &of->tokens[t];
}

void forget_rows(fixture *f)
{
    for (uint32_t i = 0; f->decoded && i < 2 * f->c->batch * f->c->n_kv_heads; i++) {
        free(f->decoded[i].rows);
        free(f->decoded[i].rotated);
        free(f->decoded[i].tokens);
    }
    free(f->decoded);
    f->decoded = NULL;
}

/* The sizes of a token's scales. */
static sizes sizes_at(const kvant_cuda_codec *codec, token_row *token, uint32_t t)
{
    if (!token->has_sizes && !token->at.open)
        token->s = sizes_of(codec, token->at.page, t % 64, token->valid);
    token->has_sizes = true;
    return token->s;
}

/* A query row. */
typedef struct query {
    uint32_t b, token, head;
} query;

/* The bias of a score; -INFINITY if the token is hidden. */
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

/* Applies softcap, mask and ALiBi to the score of a token that is not hidden. A softcap adds 2^-20
 * of itself to the error and does not enlarge other errors. A bias is rounded to fp32 some times.
 * Returns the additional error of the score. */
static double change_score(const fixture *f, const query *at, int32_t t, double *score)
{
    double error = 0;
    if (f->p.softcap > 0) {
        *score = f->p.softcap * tanh(*score / f->p.softcap);
        error += f->p.softcap * 0x1p-20;
    }
    const double bias = bias_of(f, at, t);
    *score += bias;
    return error + fabs(bias) * 0x1p-20;
}

/* A query row as the GPU multiplies it, and the part that its keys' centre adds to scores. */
typedef struct transformed {
    float q[MAX_D], rotated[MAX_D];
    double q1, unit, bias, bias_size;
} transformed;

/* Transforms the query for keys of matrix m. Rows are decoded without their scale, so the query is
 * multiplied by it. */
static void transform(const fixture *f, const query *at, uint32_t kv, uint32_t m, transformed *r)
{
    const uint32_t d = f->c->head_dim;
    const float *given =
        f->q + (((size_t)f->q_ids[m] * f->n_rows + row_of(f, at->b, at->token)) * f->c->n_heads +
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

/* The part that a page's own centre adds to the scores of a row. *error: how far the GPU may be
 * from it. */
static double page_bias(const fixture *f, const query *at, uint32_t kv, int32_t t, double *error)
{
    const uint32_t d = f->c->head_dim;
    double size;
    const double bias = centered_product(
        &f->block_centers, at->b * f->blocks_per_row + (uint32_t)t / 64, kv,
        f->plain_q + ((size_t)row_of(f, at->b, at->token) * f->c->n_heads + at->head) * d, &size);
    *error = (2 * d + 32) * 0x1p-24 * size;
    return bias;
}

/* Fills scores; returns the largest error of a score whose token is not hidden. */
static double score_errors(fixture *f, const query *at, units_kind wanted, uint32_t kv,
                           double *scores)
{
    static transformed rows[KVANT_CUDA_MOST_MATRICES];
    const units_kind units = units_for(wanted, f->cache.gpu_k);
    const bool tiles = units == PAGE_UNITS;
    const uint32_t b = at->b;
    const kvant_cuda_codec *codec = f->cache.gpu_k;
    const kvant_cuda_params *p = &codec->params;
    uint32_t d = f->c->head_dim;
    double scale = 1 / sqrtf((float)d), delta = 0, k_error = step_error(f->cache.gpu_k),
           of_page = 0, page_error = 0;
    for (uint32_t m = 0; m < f->n_matrices; m++)
        transform(f, at, kv, m, &rows[m]);
    for (int32_t t = 0; t < f->c->lengths[b]; t++) {
        const transformed *own = &rows[matrix_of(f, b, t)];
        const float *q = own->q, *rotated = own->rotated;
        const double q1 = own->q1, unit = own->unit;
        token_row *token = row_at(f, KVANT_ROLE_K, b, t, kv);
        const float *row = token->row, *y = token->rotated;
        if (f->plain_q && t % 64 == 0)
            of_page = page_bias(f, at, kv, t, &page_error);
        scores[t] = bias_of(f, at, t);
        if (isinf(scores[t]))
            continue;
        const double y1 = token->sum;
        double sum = 0, of_scales = 0, qy = 0;
        for (uint32_t j = 0; j < d; j++) {
            sum += (double)q[j] * row[j];
            qy += fabs((double)rotated[j] * y[j]);
        }
        scores[t] = scale * (sum + own->bias + of_page);
        const double plain = fabs(scores[t]),
                     more = change_score(f, at, t, &scores[t]) +
                            scale * (own->bias_size * 0x1p-19 + page_error);
        if (units == ROW_UNITS) {
            of_scales = (roundings(codec, &token->at) * 0x1p-11 + d / 16 * 0x1p-22) * qy +
                        (0x1p-23 * token->largest +
                         rotated_error(codec, &token->at, (uint32_t)t % 64, token->length)) *
                            q1;
            delta = fmax(delta, scale * ((unit * 0x1p-12 + f->query_error) * y1 + of_scales) +
                                    plain * 0x1p-20 + more);
            continue;
        }
        const sizes s = sizes_at(codec, token, (uint32_t)t);
        if (p->grouping == KVANT_CUDA_GROUP_TOKENS && !tiles) /* rounded to fp16 once more */
            of_scales = largest_code(codec) * (0x1p-11 * q1 * s.scale + 0x1p-25 * unit * d);
        of_scales += p->hybrid ? 0x1p-11 * s.zero * q1 : 0;
        if (has_chunks(codec) && !token->at.open)
            of_scales = CHUNK_RELATIVE * qy + CHUNK_ABSOLUTE * s.scale * q1;
        if (p->decoder == KVANT_CUDA_CODEBOOK6 && !tiles && !token->at.open)
            of_scales += 0x1p-11 * qy;
        if (tiles && !token->at.open)
            of_scales +=
                0x1p-11 * qy + token->resolution * q1 + (p->symmetric ? 0x1p-11 * s.zero * q1 : 0);
        /* last term: fp32 sums of codes of up to 255 with their bias, and exponents of base 2 up to
         * 2^7 */
        delta = fmax(delta,
                     scale * ((unit * 0x1p-12 + f->query_error) * y1 + k_error * s.scale * q1 +
                              of_scales +
                              (d / 16) * 0x1p-22 * q1 * (s.scale * 255 + s.zero + fabs(y1 / d))) +
                         plain * 0x1p-20 + more);
    }
    return delta;
}

/* Softmax over the decoded rows of a sequence for one query row, and the bound of this file's head
 * comment. */
static void compute_row(fixture *f, const query *at, units_kind wanted, reference *r)
{
    const units_kind units = units_for(wanted, f->cache.gpu_v);
    const bool tiles = units == PAGE_UNITS;
    const uint32_t b = at->b, head = at->head;
    const attention_case *c = f->c;
    const kvant_cuda_codec *codec = f->cache.gpu_v;
    const kvant_cuda_params *p = &codec->params;
    uint32_t d = c->head_dim, kv = head / (c->n_heads / c->n_kv_heads);
    int32_t n = c->lengths[b];
    double *scores = malloc((size_t)n * sizeof *scores), top = -INFINITY;
    const double v_error = units == ROW_UNITS ? 0 : step_error(f->cache.gpu_v);
    double delta = score_errors(f, at, wanted, kv, scores);
    for (int32_t t = 0; t < n; t++)
        top = fmax(top, scores[t]);
    if (isinf(top)) { /* the query row sees no token */
        *r = (reference){ .lse = f->sinks ? f->sinks[head] : -INFINITY, .lse_bound = 0x1p-20 * 8 };
        free(scores);
        return;
    }
    double total = 0, norms = 0, rounded = 0, summed = 0, largest = 0, small = 0, small_zero = 0,
           weighted_scale = 0, tile = 0;
    double root = sqrt(d), code = largest_code(codec);
    memset(r->out, 0, sizeof r->out);
    for (int32_t t = 0; t < n; t++) {
        token_row *token = row_at(f, KVANT_ROLE_V, b, t, kv);
        const float *row = token->row;
        if (isinf(scores[t]))
            continue;
        const double w = exp(scores[t] - top), length = token->length;
        for (uint32_t j = 0; j < d; j++)
            r->out[j] += w * row[j];
        total += w;
        norms += w * length;
        if (units == ROW_UNITS) { /* the unit is between norm / (8 root) and four times the norm */
            rounded += (1 + roundings(codec, &token->at)) * w * length;
            tile += w * rotated_error(codec, &token->at, (uint32_t)t % 64, length) * root;
            summed += w * length;
            small += 8 * root + (token->at.open ? length : 0);
            largest = fmax(largest, fmax(4 * w * length, token->at.open ? w * 0x1p-7 : 0));
            tile += w * (0x1p-23 * length + 0x1p-64) * root;
            continue;
        }
        if (tiles) {
            rounded += (token->at.open ? 1 : 2) * w * length;
            small += length / token->unit;
            largest = fmax(largest, w * token->unit);
            tile += w * token->resolution * root;
            const sizes s = sizes_at(codec, token, (uint32_t)t);
            weighted_scale += w * s.scale;
            summed += w * (s.scale * code + s.zero) * root + w * length;
            tile += p->symmetric ? w * 0x1p-11 * s.zero * root : 0;
            continue;
        }
        if (token->at.open) { /* weights are relative to the page's largest weight */
            rounded += w * length;
            summed += w * length;
            small_zero += length;
            largest = fmax(largest, w * 0x1p-16);
            continue;
        }
        const sizes s = sizes_at(codec, token, (uint32_t)t);
        weighted_scale += w * s.scale;
        summed += w * (s.scale * code + s.zero) * root;
        rounded += p->hybrid ? w * s.zero * root : 0;
        summed += has_chunks(codec) ? w * length : 0; /* outliers are larger than codes */
        if (p->grouping == KVANT_CUDA_GROUP_TOKEN) {
            rounded += w * s.scale * code * root;
            small += code * root;
            largest = fmax(largest, w * s.scale);
        } else if (p->grouping == KVANT_CUDA_GROUP_TOKENS) { /* weights without a scale */
            rounded += w * (s.scale * code + s.zero) * root;
            small_zero += (s.scale * code + s.zero) * root;
        } else { /* weight, scale and product are rounded, and zero points, too */
            rounded += w * (2 * s.scale * code + s.zero) * root;
            small += (3 * code + s.zero / s.page_scale) * root;
            summed +=
                w * s.page_zero * 0x1p-3 * root; /* 2^-25 for a zero point, as 2^-22 of an eighth */
            largest = fmax(largest, w * s.page_scale);
        }
    }
    /* a sink is a token without a value; only tokens that have a value have the centre */
    const double seen = total;
    total += f->sinks ? exp(f->sinks[head] - top) : 0;
    double factor = 1, center_norm = 0; /* the largest bound */
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

void compute_reference(fixture *f, uint32_t b, uint32_t token, uint32_t head, reference *r)
{
    *r = (reference){ .lse = f->sinks ? f->sinks[head] : -INFINITY };
    if (f->c->lengths[b] <= 0 || f->p.no_blocks)
        return;
    const query at = { b, token, head };
    *r = (reference){ 0 };
    /* the largest bound of the kernels that may compute the problem: a library may lack decode
     * kernels */
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
