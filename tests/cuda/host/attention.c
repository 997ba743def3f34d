/* attention.c - attention of the mock device (host.h), in double precision over decoded rows. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvant/block_attention.h>

#include "../../../src/base/half.h"
#include "internal.h"

kvant_status host_attention_check(const kvant_cuda_codec *k, const kvant_cuda_codec *v, char *err,
                                  size_t errlen)
{
    const char *refusal = getenv(HOST_NO_PAIR_ENV);
    host_note(&host.codec, &k, sizeof host.codec);
    if (host_answers("attention_check", NULL, 0, NULL)) {
        snprintf(err, errlen, "%s", host.said);
        return host.answer;
    }
    if (!refusal && host_is_open(k) == host_is_open(v))
        return KVANT_OK;
    snprintf(err, errlen, "%s",
             refusal ? refusal : "one codec is of exact pages, the other codec of sealed pages");
    return KVANT_ERR_UNSUPPORTED;
}

size_t host_attention_workspace(uint32_t head_dim, uint32_t n_matrices)
{
    return (size_t)head_dim * (2 + (n_matrices > 1 ? n_matrices : 1));
}

void host_limit_shared_memory(size_t bytes)
{
    host.shared_limit = bytes;
}

/* Transformed rows of a kv head; zeros for tokens that the table hides. */
static void rows_of(const kvant_cuda_kernel_attention_args *a, bool keys, uint32_t head,
                    float *rows)
{
    const kvant_cuda_codec *codec = keys ? a->k_codec : a->v_codec;
    const kvant_cuda_pages *sealed = keys ? &a->k : &a->v, *open = keys ? &a->k_open : &a->v_open;
    const uint32_t d = codec->params.head_dim;
    const kvant_codec own = host_of_head(host_source(codec), a->centroids[!keys], head);
    for (int32_t t = 0; t < a->lengths[0]; t++) {
        const int32_t entry = a->block_table[t / TOKENS];
        float *y = rows + (size_t)t * d;
        if (entry == KVANT_CUDA_NO_BLOCK)
            memset(y, 0, d * sizeof *y);
        else if (entry < 0)
            kvant_codec_decode_open(host_source(codec), host_kernels(),
                                    host_page(open, (uint32_t)(-1 - entry), head),
                                    (uint32_t)(t % TOKENS), 1, y);
        else
            kvant_codec_decode_transformed(&own, host_kernels(),
                                           host_page(sealed, (uint32_t)entry, head),
                                           (uint32_t)(t % TOKENS), y);
    }
}

static float number(const void *from, size_t i, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F32)
        return ((const float *)from)[i];
    const uint16_t bits = ((const uint16_t *)from)[i];
    return type == KVANT_CUDA_F16 ? kvant_half_to_float(bits) : kvant_bf16_to_float(bits);
}

static void store(float x, void *to, size_t i, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F32)
        ((float *)to)[i] = x;
    else
        ((uint16_t *)to)[i] =
            type == KVANT_CUDA_F16 ? kvant_half_from_float(x) : kvant_bf16_from_float(x);
}

static double slope_of(const kvant_cuda_kernel_attention_args *a, uint32_t head)
{
    const uint32_t n = 1u << (31 - __builtin_clz(a->n_heads));
    const double steps = head < n ? (head + 1.0) / n : (2.0 * (head - n) + 1) / (2.0 * n);
    return a->max_bias > 0 ? exp2(-a->max_bias * steps) : 1;
}

static double bias_of(const kvant_cuda_kernel_attention_args *a, uint32_t head, uint32_t query,
                      int32_t position, int32_t token)
{
    if ((a->causal && token > position) || (a->window && position - token >= (int32_t)a->window))
        return -INFINITY;
    if (a->mask)
        return slope_of(a, head) *
               kvant_half_to_float(a->mask[query * a->mask_token_stride + (uint32_t)token]);
    return a->max_bias > 0 ? slope_of(a, head) * (token - position) : 0;
}

/* Transforms a query for keys of matrix m; returns the part that the keys' centre adds to a
 * score. */
static double query_of(const kvant_cuda_kernel_attention_args *a, uint32_t query, uint32_t head,
                       uint32_t kv, uint32_t m, float *q)
{
    const uint32_t d = a->k_codec->params.head_dim;
    const size_t at =
        a->q_ids[m] * a->q_matrix_stride + query * a->q_token_stride + head * a->q_head_stride;
    const float *center = a->k_center ? a->k_center + ((size_t)m * a->n_kv_heads + kv) * d : NULL;
    const kvant_transform rotation = host_transform(a->k_codec, NULL, 0);
    double added = 0;
    float x[MOST];
    for (uint32_t j = 0; j < d; j++) {
        added += center ? (double)number(a->q, at + j, a->type) * center[j] : 0;
        x[j] = number(a->q, at + j, a->type) * (a->k_scale ? a->k_scale[kv * d + j] : 1);
    }
    if (host_source(a->k_codec)->transform.key_transform &&
        !host_source(a->k_codec)->transform.diagonal)
        memcpy(q, x, d * sizeof *q);
    else
        kvant_transform_forward(&rotation, host_kernels(), NULL, x, q);
    return added;
}

/* The part that a page's own centre adds to its scores. rows: number of query rows of a page in
 * page_offsets. */
static double offset_of(const kvant_cuda_kernel_attention_args *a, size_t rows, uint32_t kv,
                        uint32_t row, size_t page)
{
    return a->page_offsets ? a->page_offsets[(kv * a->table_stride + page) * rows + row] : 0;
}

/* Wide vectors make tests of llama.cpp's caches a third faster. The sums have the same order and
 * the same bits at every width. Sanitizers do not support functions that are chosen when a library
 * is loaded. */
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) &&                 \
    !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDE
#endif

/* Adds the row of values, times its weight. */
WIDE static void add_row(double weight, const float *row, uint32_t n, double *sums)
{
    for (uint32_t j = 0; j < n; j++)
        sums[j] += weight * row[j];
}

/* Several partial sums do not depend on each other, so the compiler computes several at a time. */
WIDE static double dot(const float *x, const float *y, uint32_t n)
{
    double sums[8] = { 0 }, sum = 0;
    uint32_t j = 0;
    for (; j + 8 <= n; j += 8)
        for (uint32_t i = 0; i < 8; i++)
            sums[i] += (double)x[j + i] * y[j + i];
    for (; j < n; j++)
        sum += (double)x[j] * y[j];
    for (uint32_t i = 0; i < 8; i++)
        sum += sums[i];
    return sum;
}

static void attend_head(const kvant_cuda_kernel_attention_args *a, size_t rows, const float *keys,
                        const float *values, uint32_t query, uint32_t head)
{
    const uint32_t group = a->n_heads / a->n_kv_heads, kv = head / group,
                   d = a->k_codec->params.head_dim;
    const int32_t n = a->lengths[0], position = n - (int32_t)a->query_tokens + (int32_t)query;
    double total = 0, seen = 0, top = a->sinks ? a->sinks[head] : -INFINITY, sums[MOST] = { 0 };
    double *scores = malloc(((size_t)n + 1) * sizeof *scores);
    double added[KVANT_CUDA_MOST_MATRICES];
    float q[KVANT_CUDA_MOST_MATRICES][MOST], y[MOST], x[MOST];
    const size_t to = query * a->out_token_stride + head * a->out_head_stride;
    for (uint32_t m = 0; m < (a->n_matrices > 1 ? a->n_matrices : 1); m++)
        added[m] = query_of(a, query, head, kv, m, q[m]);
    for (int32_t t = 0; t < n; t++) {
        const uint32_t m = a->n_matrices > 1 ? a->matrices[t / TOKENS] : 0;
        const bool there = a->block_table[t / TOKENS] != KVANT_CUDA_NO_BLOCK;
        const double bias = there ? bias_of(a, head, query, position, t) : -INFINITY;
        scores[t] = -INFINITY;
        if (bias == -INFINITY) /* a causal mask hides half of a prompt's pairs */
            continue;
        double sum =
            added[m] + offset_of(a, rows, kv, query * group + head % group, (size_t)t / TOKENS);
        sum = a->scale * (sum + dot(q[m], keys + (size_t)t * d, d));
        sum = a->logit_softcap > 0 ? a->logit_softcap * tanh(sum / a->logit_softcap) : sum;
        scores[t] = sum + bias;
        top = fmax(top, scores[t]);
    }
    for (int32_t t = 0; t < n; t++) {
        const double w = scores[t] > -INFINITY ? exp(scores[t] - top) : 0;
        if (w > 0)
            add_row(w, values + (size_t)t * d, d, sums);
        seen += w;
    }
    total = seen + (a->sinks ? exp(a->sinks[head] - top) : 0);
    for (uint32_t j = 0; j < d; j++)
        y[j] = total > 0 ? (float)(sums[j] / total) : 0;
    const kvant_transform rotation = host_transform(a->v_codec, NULL, 0);
    kvant_transform_inverse(&rotation, host_kernels(), NULL, y, x);
    for (uint32_t j = 0; j < d; j++)
        store(x[j] * (a->v_scale ? a->v_scale[kv * d + j] : 1) +
                  (a->v_center && total > 0 ? (float)(seen / total) * a->v_center[kv * d + j] : 0),
              a->out, to + j, a->out_type);
    if (a->lse)
        a->lse[query * a->n_heads + head] = total > 0 ? (float)(top + log(total)) : -INFINITY;
    free(scores);
}

static void attend_sequence(const kvant_cuda_kernel_attention_args *a, size_t offset_rows)
{
    const size_t rows = ((size_t)a->lengths[0] + 1) * a->k_codec->params.head_dim;
    const uint32_t group = a->n_heads / a->n_kv_heads;
    float *keys = malloc(rows * sizeof *keys), *values = malloc(rows * sizeof *values);
    for (uint32_t kv = 0; kv < a->n_kv_heads; kv++) {
        rows_of(a, true, kv, keys);
        rows_of(a, false, kv, values);
        for (uint32_t i = 0; i < a->query_tokens * group; i++)
            attend_head(a, offset_rows, keys, values, i / group, kv * group + i % group);
    }
    free(keys);
    free(values);
}

/* Exchanges the first channel of the last query token and head with the channel half a head
 * later. */
static void swap_channels(const kvant_cuda_kernel_attention_args *a)
{
    const size_t at = (a->query_tokens - 1) * a->out_token_stride +
                      (a->n_heads - 1) * a->out_head_stride,
                 other = at + a->k_codec->params.head_dim / 2;
    const float first = number(a->out, at, a->out_type);
    store(number(a->out, other, a->out_type), a->out, at, a->out_type);
    store(first, a->out, other, a->out_type);
}

/* The library needs a workspace whose counters are zero and leaves them zero, or it clears them. */
static bool has_workspace(const kvant_cuda_kernel_attention_args *a)
{
    const unsigned char *workspace = a->workspace;
    return a->workspace_bytes >=
               host_attention_workspace(a->k_codec->params.head_dim, a->n_matrices) &&
           (a->clear_counters || workspace[0] == 0);
}

/* Kernels copy pages without new tokens early, so the newest token must be where the arguments
 * say. */
static bool has_new_cells(const kvant_cuda_kernel_attention_args *a)
{
    for (uint32_t b = 0; a->new_cells && b < a->batch; b++) {
        const int64_t cell = a->new_cells[b] - a->new_first - b * a->new_stride;
        if (cell < 0 || cell >= a->lengths[b])
            return false;
    }
    return true;
}

static kvant_status attend(const kvant_cuda_kernel_attention_args *args, kvant_cuda_stream stream)
{
    if (!has_workspace(args) || (host_driver_runs() && !stream))
        return KVANT_ERR_ARGUMENT;
    if (!host_is_here(args->k.base) || !host_is_here(args->v.base) || !host_is_here(args->q) ||
        !host_is_here(args->out) || !host_is_here(args->block_table) ||
        !host_is_here(args->matrices) || !host_is_here(args->k_center) ||
        !host_is_here(args->page_offsets) || !host_is_here(args->mask) ||
        !host_is_here(args->workspace))
        return KVANT_ERR_CUDA;
    const size_t width = args->type == KVANT_CUDA_F32 ? 4 : 2,
                 out_width = args->out_type == KVANT_CUDA_F32 ? 4 : 2,
                 used = host_attention_workspace(args->k_codec->params.head_dim, 1);
    if (args->page_offsets && (args->k_center || args->logit_softcap > 0))
        return KVANT_ERR_ARGUMENT;
    if (!has_new_cells(args) || args->n_matrices > KVANT_CUDA_MOST_MATRICES ||
        (args->n_matrices > 1 && !args->matrices))
        return KVANT_ERR_ARGUMENT;
    memset((char *)args->workspace + used, 0xff,
           args->workspace_bytes - used); /* unpacked pages overwrite this part */
    for (uint32_t b = 0; b < args->batch; b++) {
        kvant_cuda_kernel_attention_args one = *args;
        const uint32_t most = args->query_tokens ? args->query_tokens : 1;
        const int32_t *starts = args->query_starts;
        const size_t first = starts ? (size_t)starts[b] : (size_t)b * most;
        const size_t q = starts ? first * args->q_token_stride : b * args->q_batch_stride,
                     out = starts ? first * args->out_token_stride : b * args->out_batch_stride;
        one.query_tokens = starts ? (uint32_t)(starts[b + 1] - starts[b]) : most;
        if (one.query_tokens > most)
            return KVANT_ERR_ARGUMENT;
        one.block_table += b * args->table_stride;
        one.matrices += args->n_matrices > 1 ? b * args->table_stride : 0;
        one.lengths += b;
        one.q = (const char *)args->q + q * width;
        one.out = (char *)args->out + out * out_width;
        one.lse = args->lse ? args->lse + first * args->n_heads : NULL;
        one.mask = args->mask ? args->mask + first * args->mask_token_stride : NULL;
        const size_t offset_rows = (size_t)most * (args->n_heads / args->n_kv_heads);
        one.page_offsets =
            args->page_offsets
                ? args->page_offsets + b * args->n_kv_heads * args->table_stride * offset_rows
                : NULL;
        attend_sequence(&one, offset_rows);
    }
    if (host_is_wrong("attention") && args->query_tokens == 32)
        swap_channels(args);
    return KVANT_OK;
}

/* Computes as the library does, which finds offsets of pages in the kernel or before it. */
static kvant_status attend_rotated(const kvant_cuda_kernel_attention_args *args,
                                   kvant_cuda_stream stream)
{
    const kvant_cuda_plain_queries *plain_queries = &args->plain_queries;
    kvant_cuda_kernel_attention_args found = *args;
    const kvant_cuda_page_offsets_args of = { .size = sizeof of,
                                              .q = plain_queries->q,
                                              .type = plain_queries->type,
                                              .q_batch_stride = plain_queries->q_batch_stride,
                                              .q_token_stride = plain_queries->q_token_stride,
                                              .q_head_stride = plain_queries->q_head_stride,
                                              .batch = args->batch,
                                              .n_heads = args->n_heads,
                                              .n_kv_heads = args->n_kv_heads,
                                              .head_dim = args->k_codec->params.head_dim,
                                              .query_tokens = args->query_tokens,
                                              .query_starts = args->query_starts,
                                              .lengths = args->lengths,
                                              .table_stride = args->table_stride,
                                              .block_centers = plain_queries->block_centers,
                                              .offsets = plain_queries->offsets };
    const kvant_status status =
        args->page_offsets ? KVANT_ERR_ARGUMENT : host_page_offsets(&of, stream);

    found.page_offsets = plain_queries->offsets;
    return status == KVANT_OK ? attend(&found, stream) : status;
}

kvant_status host_attention(const kvant_cuda_kernel_attention_args *args, kvant_cuda_stream stream)
{
    ANSWER(attention, args, stream);
    host_note(&host.attention, args, sizeof *args);
    kvant_cuda_kernel_attention_args full = *args;
    full.out_type = args->out_type == KVANT_CUDA_F32 ? args->type : args->out_type;
    return args->plain_queries.q ? attend_rotated(&full, stream) : attend(&full, stream);
}

static bool sees_mark(const kvant_cuda_marked_args *a, uint32_t b, uint32_t query)
{
    const int32_t length = a->lengths[b],
                  seen =
                      a->causal ? length - (int32_t)a->query_tokens + (int32_t)query + 1 : length;
    const uint16_t *mask =
        a->mask ? a->mask + ((size_t)b * a->query_tokens + query) * a->mask_token_stride : NULL;
    bool any = false;
    for (int32_t t = 0; t < seen; t++) {
        const int64_t number = a->first + b * a->stride + t;
        any =
            any || ((a->marks[1 + number / 32] >> number % 32 & 1) && !(mask && mask[t] == 0xfc00));
    }
    return any;
}

static void spread_mark(const kvant_cuda_marked_args *a, uint32_t query)
{
    for (uint32_t i = 0; i < a->n_spread; i++) {
        const int64_t number = a->spread[i].numbers[query];
        a->spread[i].marks[1 + number / 32] |= 1u << number % 32;
        a->spread[i].marks[0] = 1;
    }
}

static bool spread_is_here(const kvant_cuda_marked_args *a)
{
    bool here = true;
    for (uint32_t i = 0; i < a->n_spread; i++)
        here = here && host_is_here(a->spread[i].marks) && host_is_here(a->spread[i].numbers);
    return here;
}

kvant_status host_fill_marked(const kvant_cuda_marked_args *args, kvant_cuda_stream stream)
{
    ANSWER(fill_marked, args, stream);
    if (!args->marks || !args->lengths || !args->out || args->query_tokens == 0 ||
        args->n_heads == 0 || args->head_dim == 0 || args->n_spread > KVANT_CUDA_MOST_SPREAD)
        return KVANT_ERR_ARGUMENT;
    if (!spread_is_here(args) || !host_is_here(args->marks) || !host_is_here(args->lengths) ||
        !host_is_here(args->out) || !host_is_here(args->mask))
        return KVANT_ERR_CUDA;
    for (uint32_t i = 0; args->marks[0] && i < args->batch * args->query_tokens; i++) {
        const uint32_t b = i / args->query_tokens, query = i % args->query_tokens;
        const bool sees = sees_mark(args, b, query);
        if (sees)
            spread_mark(args, i);
        for (uint32_t j = 0; sees && j < args->n_heads * args->head_dim; j++)
            store(NAN, args->out,
                  b * args->out_batch_stride + query * args->out_token_stride +
                      j / args->head_dim * args->out_head_stride + j % args->head_dim,
                  args->type);
    }
    return KVANT_OK;
}

/* The same rows for the CPU's attention. */
static kvant_block_rows host_rows(const kvant_cuda_block_args *a, const kvant_cuda_block_rows *rows,
                                  uint32_t sequence)
{
    const size_t last =
        (size_t)(a->n_tokens - 1) * rows->token_stride + (a->n_kv_heads - 1) * rows->head_stride;
    return (kvant_block_rows){ .size = sizeof(kvant_block_rows),
                               .type = (kvant_block_type)rows->type,
                               .head_dim = a->head_dim,
                               .n_kv_heads = a->n_kv_heads,
                               .data = (const char *)rows->data + sequence * rows->batch_stride,
                               .bytes = last + kvant_block_row_bytes((kvant_block_type)rows->type,
                                                                     a->head_dim),
                               .token_stride = rows->token_stride,
                               .head_stride = rows->head_stride };
}

size_t host_block_workspace(const kvant_cuda_block_args *a)
{
    return a->n_heads / a->n_kv_heads * a->query_tokens <= 16 && a->k.type == a->v.type &&
                   (a->k.type == KVANT_BLOCK_Q8_0 || a->k.type == KVANT_BLOCK_Q4_0)
               ? 64
               : 0;
}

kvant_status host_block_attention(const kvant_cuda_block_args *args, kvant_cuda_stream stream)
{
    ANSWER(block_attention, args, stream);
    kvant_status status = KVANT_OK;
    for (uint32_t b = 0; b < args->batch && status == KVANT_OK; b++) {
        const kvant_block_rows k = host_rows(args, &args->k, b), v = host_rows(args, &args->v, b);
        const kvant_attention_problem problem = {
            .size = sizeof problem,
            .n_tokens = args->n_tokens,
            .n_queries = args->query_tokens,
            .n_heads = args->n_heads,
            .q = args->q + b * args->q_batch_stride,
            .q_token_stride = args->q_token_stride,
            .q_head_stride = args->q_head_stride,
            .mask = args->mask ? args->mask + b * args->mask_batch_stride : NULL,
            .mask_token_stride = args->mask_token_stride,
            .sinks = args->sinks,
            .scale = args->scale,
            .max_bias = args->max_bias,
            .logit_softcap = args->logit_softcap,
            .out = args->out + b * args->out_batch_stride,
            .out_token_stride = args->out_token_stride,
            .out_head_stride = args->out_head_stride,
            .n_threads = 1
        };
        size_t bytes = 0;
        status = kvant_block_attention_workspace(&k, &v, &problem, &bytes);
        void *workspace = aligned_alloc(64, (bytes + 64) / 64 * 64);
        if (status == KVANT_OK)
            status = kvant_block_attention(&k, &v, &problem, workspace, bytes);
        free(workspace);
    }
    return status;
}

kvant_status host_rotate_rows(const kvant_cuda_rotate_rows_args *a, kvant_cuda_stream stream)
{
    static float columns[MOST * MOST]; /* columns of the kv head's matrix, each contiguous */
    float x[MOST], y[MOST];
    const size_t d = a->head_dim, group = a->n_heads / a->n_kv_heads;
    for (size_t h = 0; h < a->n_heads; h++) {
        const size_t at = h / group * d;
        const float *matrix = a->matrix + h / group * a->matrix_stride;
        for (size_t i = 0; h % group == 0 && i < d * d; i++)
            columns[i] = matrix[i % d * d + i / d];
        for (uint32_t t = 0; t < a->n_tokens; t++) {
            for (size_t j = 0; j < d; j++) {
                x[j] = a->rows[t * a->token_stride + h * a->head_stride + j] -
                       (a->center ? a->center[at + j] : 0);
                x[j] = x[j] / (a->divisor ? a->divisor[at + j] : 1) *
                       (a->before ? a->before[at + j] : 1);
            }
            for (size_t i = 0; i < d; i++)
                y[i] = host_kernels()->dot(columns + i * d, x, (uint32_t)d) *
                       (a->after ? a->after[at + i] : 1);
            memcpy(a->out + t * a->out_token_stride + h * a->out_head_stride, y, d * sizeof *y);
        }
    }
    return KVANT_OK;
}

void host_rotate_queries(const kvant_cuda_kernel_query_args *args, kvant_cuda_stream stream)
{
    const size_t d = args->k_codec->params.head_dim, rows = (size_t)args->batch * args->n_heads;
    for (size_t i = 0; i <= args->n_further; i++)
        host_reads(stream, i == 0 ? args->inverse_key_transform : args->further[i - 1]);
    for (size_t i = 0; i < (1 + args->n_further) * rows; i++) {
        const size_t head = i % args->n_heads, kv = head / (args->n_heads / args->n_kv_heads);
        const size_t at =
            i % rows / args->n_heads * args->q_batch_stride + head * args->q_head_stride;
        const float *matrix = i < rows ? args->inverse_key_transform : args->further[i / rows - 1],
                    *m = matrix + kv * d * d;
        if (args->compact >> i / rows & 1) {
            const kvant_transform t = host_compact_transform(args->k_codec, matrix, (uint32_t)kv);
            float q[MOST];
            for (size_t k = 0; k < d; k++)
                q[k] = number(args->q, at + k, args->type);
            kvant_transform_dual(&t, host_kernels(), 1, q, args->out + i * d);
            continue;
        }
        for (size_t j = 0; j < d; j++) {
            double sum = 0;
            for (size_t k = 0; k < d; k++)
                sum += (double)number(args->q, at + k, args->type) * m[k * d + j];
            args->out[i * d + j] = (float)sum;
        }
    }
}

kvant_status host_transform_queries(const kvant_cuda_kernel_query_args *args,
                                    kvant_cuda_stream stream)
{
    ANSWER(transform_queries, args, stream);
    if (args->compact && args->compact >> args->n_further >> 1)
        return KVANT_ERR_ARGUMENT;
    host_rotate_queries(args, stream);
    return KVANT_OK;
}
