/* pages.c - encodes rows into pages and decodes them: append, seal and decode of the mock device
 * (host.h). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../../../src/base/half.h"
#include "../../../src/cuda/pages/exact_step.h"
#include "internal.h"

/* Marks a token as refused, if the caller asks for marks. Kernels write only rows that a codec
 * accepts. */
static void mark(const kvant_cuda_kernel_append_args *args, uint32_t token)
{
    const int64_t number = args->mark_ids ? args->mark_ids[token] : args->slots[token];
    if (!args->marks)
        return;
    args->marks[0] = 1;
    args->marks[1 + number / 32] |= 1u << number % 32;
}

static bool takes(const kvant_cuda_kernel_append_args *args, const kvant_cuda_rows *rows,
                  const float *x, const float *y)
{
    const kvant_codec *codec = host_source(rows->codec);
    const bool open = host_is_open(rows->codec);
    bool finite = true, fits = true;
    for (uint32_t j = 0; j < codec->info.head_dim; j++) {
        finite = finite && isfinite(x[j]);
        fits = fits && (!open || fabsf(y[j]) <= codec->view.exact_limit);
    }
    fits =
        fits && finite && (open || codec->quantizer->check(codec, host_kernels(), y) == KVANT_OK);
    if (!fits && args->refused)
        *args->refused |= finite ? KVANT_CUDA_ROW_RANGE : KVANT_CUDA_ROW_NONFINITE;
    return fits;
}

kvant_codec host_of_head(const kvant_codec *codec, const float *centroids, uint32_t head)
{
    kvant_codec copy = *codec;
    if (centroids) /* the state of the head's own codec in memory */
        copy.state =
            (void *)(uintptr_t)(centroids + head * (codec->view.table_bytes / sizeof(float)));
    return copy;
}

/* The codec with a kv head's own centroids and feedback. The caller frees *own. */
static kvant_codec of_head(const kvant_codec *codec, const float *centroids, const float *feedback,
                           uint32_t head, kvant_feedback **own)
{
    kvant_codec copy = host_of_head(codec, centroids, head);
    const size_t d = codec->info.head_dim;
    *own = NULL;
    if (!codec->feedback || !feedback)
        return copy;
    *own = malloc(sizeof **own + d * d * sizeof(float));
    (*own)->n = (*own)->stride = (uint32_t)d;
    memcpy((*own)->pivots, feedback + head * (d + d * d), d * sizeof(float));
    memcpy((*own)->columns, feedback + head * (d + d * d) + d, d * d * sizeof(float));
    copy.feedback = *own;
    return copy;
}

/* Converts a row of fp16 or bf16 to floats. */
static const float *row_of(const kvant_cuda_kernel_append_args *args, const kvant_cuda_rows *rows,
                           uint32_t i, uint32_t head, float *halves)
{
    const size_t at = i * rows->token_stride + head * rows->head_stride;
    if (args->type == KVANT_CUDA_F32)
        return (const float *)rows->rows + at;
    for (uint32_t j = 0; j < host_source(rows->codec)->info.head_dim; j++) {
        const uint16_t bits = ((const uint16_t *)rows->rows)[at + j];
        halves[j] =
            args->type == KVANT_CUDA_F16 ? kvant_half_to_float(bits) : kvant_bf16_to_float(bits);
    }
    return halves;
}

/* The transform of a kv head. Keys may have a compact form. */
static kvant_transform transform_of(const kvant_cuda_kernel_append_args *args,
                                    const kvant_cuda_rows *rows, uint32_t head)
{
    return args->k_compact && rows == &args->k
               ? host_compact_transform(rows->codec, args->k_compact, head)
               : host_transform(rows->codec, rows->key_transform, head);
}

static void append_role(const kvant_cuda_kernel_append_args *args, const kvant_cuda_rows *rows)
{
    const kvant_codec *codec = rows->codec ? host_source(rows->codec) : NULL;
    for (uint32_t i = 0; codec && i < args->n_tokens; i++)
        for (uint32_t head = 0; args->slots[i] >= 0 && head < args->n_kv_heads; head++) {
            const size_t d = codec->info.head_dim;
            const kvant_transform t = transform_of(args, rows, head);
            const kvant_affine affine = { rows->center ? rows->center + head * d : NULL,
                                          rows->scale ? rows->scale + head * d : NULL };
            float y[MOST], *exact = args->exact[rows == &args->v];
            float halves[MOST];
            const float *row = row_of(args, rows, i, head, halves);
            uint8_t *page = host_page(&rows->pages, args->slots[i] / TOKENS, head);
            if (args->transformed)
                memcpy(y, row, d * sizeof *y);
            else
                kvant_transform_forward(&t, host_kernels(), &affine, row, y);
            if (!takes(args, rows, row, y)) {
                mark(args, i);
                if (args->clear_refused && host_is_open(rows->codec))
                    memset(page + (size_t)(args->slots[i] % TOKENS) * d * sizeof(uint16_t), 0,
                           d * sizeof(uint16_t));
                continue;
            }
            if (exact)
                memcpy(exact + (size_t)(page - (uint8_t *)rows->pages.base) / sizeof(uint16_t) +
                           (size_t)(args->slots[i] % TOKENS) * d,
                       y, d * sizeof *y);
            kvant_feedback *own;
            const kvant_codec with =
                of_head(codec, args->centroids[rows == &args->v], args->k_feedback, head, &own);
            (host_is_open(rows->codec) ? kvant_codec_encode_open : kvant_codec_encode_transformed)(
                &with, host_kernels(), y, (uint32_t)(args->slots[i] % TOKENS), 1, page);
            free(own);
        }
}

/* Subtracts the centres of their blocks from the keys. */
static bool center_keys(kvant_cuda_kernel_append_args *args)
{
    if (!args->k_block_centers.start)
        return true;
    if (!args->k.codec || args->type != KVANT_CUDA_F32 || args->transformed)
        return false;
    const uint32_t d = host_source(args->k.codec)->info.head_dim;
    const kvant_cuda_center_rows_args of = { .rows = args->k.rows,
                                             .type = args->type,
                                             .token_stride = args->k.token_stride,
                                             .head_stride = args->k.head_stride,
                                             .n_tokens = args->n_tokens,
                                             .n_kv_heads = args->n_kv_heads,
                                             .head_dim = d,
                                             .slots = args->center_slots,
                                             .block_centers = args->k_block_centers,
                                             .out = args->centered };
    args->k.rows = args->centered;
    args->k.token_stride = (size_t)args->n_kv_heads * d;
    args->k.head_stride = d;
    return host_center(&of);
}

/* Makes W for many rows, unless k_matrix has it. Then the keys are transformed by k_matrix. The
 * mock's W is a copy of the compact form. */
static void place_matrix(kvant_cuda_kernel_append_args *args, kvant_cuda_stream stream)
{
    const bool there = args->k_matrix_of && *args->k_matrix_of == args->k_compact;
    if (args->n_tokens <= 64)
        return;
    if (there)
        host_reads(stream, args->k_matrix);
    else
        host_writes(stream, args->k_matrix);
    if (!there)
        host_copy_compact(args->k_matrix, args->k_compact, args->k.codec, args->n_kv_heads);
    if (args->k_matrix_of)
        *args->k_matrix_of = args->k_compact;
    args->k_compact = args->k_matrix;
}

kvant_status host_append(const kvant_cuda_kernel_append_args *args, kvant_cuda_stream stream)
{
    ANSWER(append, args, stream);
    const kvant_cuda_rows *roles[] = { &args->k, &args->v };
    for (int r = 0; r < 2; r++)
        if (roles[r]->codec &&
            !(host_is_here(roles[r]->pages.base) && host_is_here(roles[r]->rows) &&
              host_is_here(roles[r]->center) && host_is_here(args->slots) &&
              host_is_here(args->marks) && host_is_here(args->mark_ids)))
            return KVANT_ERR_CUDA;
    for (int r = 0; r < 2; r++)
        if (roles[r]->codec && !host_is_open(roles[r]->codec) &&
            host_source(roles[r]->codec)->info.block_tokens > 1)
            return KVANT_ERR_UNSUPPORTED;
    kvant_cuda_kernel_append_args about = *args;
    if (args->k_compact) {
        if (!args->k.codec || !args->k_matrix)
            return KVANT_ERR_ARGUMENT;
        host_reads(stream, args->k_compact);
        place_matrix(&about, stream);
    }
    if (!center_keys(&about))
        return KVANT_ERR_ARGUMENT;
    host_reads(stream, about.k.key_transform);
    append_role(&about, &about.k);
    append_role(&about, &about.v);
    if (host_is_wrong("append") && args->v.codec)
        host_page(&args->v.pages, 0, 1)[7] ^= 1;
    if (args->queries.q)
        host_rotate_queries(&args->queries, stream);
    return KVANT_OK;
}

static void seal_page(const kvant_codec *codec, const uint8_t *open, uint8_t *sealed, uint32_t n,
                      bool exact)
{
    static float rows[TOKENS * MOST];
    const uint32_t group = codec->info.block_tokens, d = codec->info.head_dim;
    for (uint32_t first = 0; first < n; first += group) {
        for (uint32_t i = 0; i < group; i++)
            if (exact)
                memcpy(rows + i * d, (const float *)open + (first + i) * d, d * sizeof *rows);
            else
                kvant_codec_decode_open(codec, host_kernels(), open,
                                        first + i < n ? first + i : first, 1, rows + i * d);
        kvant_codec_encode_transformed(codec, host_kernels(), rows, first, group, sealed);
    }
}

static _Thread_local unsigned long n_sealed;

/* Blocks that this thread sealed. */
EXPORT(unsigned long, host_sealed, (void))
{
    return n_sealed;
}

kvant_status host_seal(const kvant_cuda_seal_args *args, kvant_cuda_stream stream)
{
    const kvant_cuda_seal_pages *roles[] = { &args->k, &args->v };
    ANSWER(seal, args, stream);
    n_sealed += args->n_blocks;
    for (int r = 0; r < 2; r++)
        for (uint32_t i = 0; roles[r]->codec && i < args->n_blocks; i++)
            for (uint32_t head = 0; head < args->n_kv_heads; head++) {
                kvant_feedback *own;
                const kvant_codec with = of_head(host_source(roles[r]->codec), args->centroids[r],
                                                 args->k_feedback, head, &own);
                seal_page(&with, host_page(&roles[r]->open, args->from[i], head),
                          host_page(&roles[r]->sealed, args->to[i], head),
                          args->tokens ? (uint32_t)args->tokens[i] : TOKENS, args->exact);
                free(own);
            }
    if (host_is_wrong("seal") && args->k.codec)
        host_page(&args->k.sealed, args->to[0], 0)[3] ^= 1;
    return KVANT_OK;
}

/* Transforms a row back. A full W^-1 contains the rotation, too. */
static void transform_back(const kvant_cuda_decode_args *args, uint32_t head, const float *y,
                           float *out)
{
    const uint32_t d = host_source(args->codec)->info.head_dim;
    const kvant_transform rotation = host_transform(args->codec, NULL, 0);
    const kvant_transform_view *view = &kvant_codec_get_view(host_source(args->codec))->transform;
    const float *inverse = args->inverse_key_transform, *center = args->center,
                *scale = args->scale;
    float x[MOST];
    const size_t at = (size_t)head * d;
    if (inverse && !view->diagonal)
        for (uint32_t j = 0; j < d; j++)
            x[j] = host_kernels()->dot(inverse + (at + j) * d, y, d);
    else
        kvant_transform_inverse(&rotation, host_kernels(), NULL, y, x);
    for (uint32_t j = 0; j < d; j++)
        out[j] =
            x[j] * (inverse && view->diagonal ? inverse[at + j] : 1) * (scale ? scale[at + j] : 1) +
            (center ? center[at + j] : 0);
}

static void decode_row(const kvant_cuda_decode_args *args, uint32_t block, uint32_t head,
                       uint32_t t)
{
    const kvant_codec *codec = host_source(args->codec),
                      own = host_of_head(codec, args->centroids, head);
    const uint8_t *page = host_page(&args->pages, args->blocks[block], head);
    const uint32_t d = codec->info.head_dim;
    const size_t row = (size_t)(args->to ? (uint32_t)args->to[block] : block) * TOKENS + t,
                 at = row * args->token_stride + head * args->head_stride;
    float y[MOST], x[MOST];
    if (host_is_open(args->codec))
        kvant_codec_decode_open(codec, host_kernels(), page, t, 1, y);
    else
        kvant_codec_decode_transformed(&own, host_kernels(), page, t, y);
    if (!args->transformed)
        transform_back(args, head, y, x);
    for (uint32_t j = 0; args->transformed && j < d; j++)
        x[j] = fminf(fmaxf(y[j] + (args->center ? args->center[head * d + j] : 0), -65504), 65504);
    for (uint32_t j = 0; j < d; j++)
        if (args->type == KVANT_CUDA_F32)
            ((float *)args->out)[at + j] = x[j];
        else
            ((uint16_t *)args->out)[at + j] = args->type == KVANT_CUDA_F16
                                                  ? kvant_half_from_float(x[j])
                                                  : kvant_bf16_from_float(x[j]);
}

kvant_status host_decode(const kvant_cuda_decode_args *args, kvant_cuda_stream stream)
{
    ANSWER(decode, args, stream);
    const bool with_matrix =
        args->codec->params.key_transform_kind != KVANT_CUDA_TRANSFORM_NONE && !args->transformed;
    if (with_matrix != (args->inverse_key_transform != NULL))
        return KVANT_ERR_ARGUMENT;
    for (uint32_t i = 0; i < args->n_blocks; i++)
        for (uint32_t head = 0; args->blocks[i] >= 0 && head < args->n_kv_heads; head++)
            for (uint32_t t = 0; t < TOKENS; t++)
                decode_row(args, i, head, t);
    if (host_is_wrong("decode") && args->type == KVANT_CUDA_F32)
        ((float *)args->out)[5] += 0.01f;
    return KVANT_OK;
}

kvant_status host_exact_step(const kvant_cuda_exact_args *args, kvant_cuda_stream stream)
{
    ANSWER(exact_step, args, stream);
    if (!exact_valid(args))
        return KVANT_ERR_ARGUMENT;
    exact_plan(args);
    for (size_t i = 0; i < exact_items(args); i++)
        exact_find(args, i);
    return KVANT_OK;
}

/* Quantises row i of a list for a kv head. */
static void seal_row(const kvant_cuda_seal_rows_args *args, const kvant_cuda_seal_pages *role,
                     uint32_t i, uint32_t head)
{
    const kvant_codec *codec = host_source(role->codec);
    float y[MOST];
    kvant_codec_decode_open(codec, host_kernels(),
                            host_page(&role->open, args->from[i] / TOKENS, head),
                            (uint32_t)(args->from[i] % TOKENS), 1, y);
    kvant_codec_encode_transformed(codec, host_kernels(), y, (uint32_t)(args->to[i] % TOKENS), 1,
                                   host_page(&role->sealed, args->to[i] / TOKENS, head));
}

kvant_status host_seal_rows(const kvant_cuda_seal_rows_args *args, kvant_cuda_stream stream)
{
    const kvant_cuda_seal_pages *roles[] = { &args->k, &args->v };
    ANSWER(seal_rows, args, stream);
    for (int r = 0; r < 2; r++) {
        const kvant_codec *codec = roles[r]->codec ? host_source(roles[r]->codec) : NULL;
        if (codec && (codec->info.block_tokens > 1 || codec->feedback || codec->view.table_bytes))
            return KVANT_ERR_UNSUPPORTED;
        for (uint32_t i = 0; codec && args->most_rows && i < *args->n_rows; i++)
            for (uint32_t head = 0; head < args->n_kv_heads; head++)
                seal_row(args, roles[r], i, head);
    }
    return KVANT_OK;
}
