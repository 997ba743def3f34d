/* centers.c - centres of blocks in the mock device (host.h). Rows use the CPU's arithmetic, offsets
 * of pages are computed in double precision. */
#include "../../../src/base/half.h"
#include "internal.h"

static float number(const void *from, size_t i, kvant_cuda_type type)
{
    if (type == KVANT_CUDA_F32)
        return ((const float *)from)[i];
    const uint16_t bits = ((const uint16_t *)from)[i];
    return type == KVANT_CUDA_F16 ? kvant_half_to_float(bits) : kvant_bf16_to_float(bits);
}

static void center_of(const kvant_cuda_block_centers *block_centers, uint32_t d, size_t block,
                      uint32_t n_kv_heads, uint32_t head, float *center)
{
    const size_t at = block_centers->transform_ids ? block_centers->transform_ids[block] : 0;
    const float *phase = block_centers->phases + block * d,
                *start = block_centers->start + (at * n_kv_heads + head) * d;
    for (uint32_t i = 0; i < d / 2; i++) {
        const uint32_t first = block_centers->pairs[2 * i],
                       second = block_centers->pairs[2 * i + 1];
        const float a = start[first], b = start[second], cosine = phase[i], sine = phase[d / 2 + i];
        center[first] = a * cosine - b * sine;
        center[second] = b * cosine + a * sine;
    }
}

static bool is_valid(const kvant_cuda_block_centers *block_centers, uint32_t d)
{
    return block_centers->pairs && block_centers->start && block_centers->phases && d > 0 &&
           d % 2 == 0 && d <= MOST;
}

bool host_center(const kvant_cuda_center_rows_args *args)
{
    const uint32_t d = args->head_dim;
    if (!args->rows || !args->slots || !args->out || args->n_kv_heads == 0 || args->add > 1 ||
        !is_valid(&args->block_centers, d))
        return false;
    for (uint32_t t = 0; t < args->n_tokens; t++)
        for (uint32_t h = 0; h < args->n_kv_heads; h++) {
            float center[MOST], *out = args->out + ((size_t)t * args->n_kv_heads + h) * d;
            if (args->slots[t] >= 0)
                center_of(&args->block_centers, d, (size_t)args->slots[t] / TOKENS,
                          args->n_kv_heads, h, center);
            for (uint32_t j = 0; j < d; j++) {
                const float x = number(
                    args->rows, t * args->token_stride + h * args->head_stride + j, args->type);
                out[j] = args->slots[t] < 0 ? x : args->add ? x + center[j] : x - center[j];
            }
        }
    return true;
}

kvant_status host_center_rows(const kvant_cuda_center_rows_args *args, kvant_cuda_stream stream)
{
    ANSWER(center_rows, args, stream);
    return host_center(args) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}

static void offsets_of(const kvant_cuda_page_offsets_args *a, uint32_t b, uint32_t kv, size_t page)
{
    const uint32_t d = a->head_dim, group = a->n_heads / a->n_kv_heads,
                   most = a->query_tokens ? a->query_tokens : 1;
    const uint32_t tokens =
        a->query_starts ? (uint32_t)(a->query_starts[b + 1] - a->query_starts[b]) : most;
    const size_t first =
        a->query_starts ? (size_t)a->query_starts[b] * a->q_token_stride : b * a->q_batch_stride;
    float center[MOST];
    center_of(&a->block_centers, d, b * a->table_stride + page, a->n_kv_heads, kv, center);
    for (uint32_t r = 0; r < tokens * group; r++) {
        const size_t at =
            first + r / group * a->q_token_stride + (kv * group + r % group) * a->q_head_stride;
        double sum = 0;
        for (uint32_t j = 0; j < d; j++)
            sum += (double)number(a->q, at + j, a->type) * center[j];
        a->offsets[(((size_t)b * a->n_kv_heads + kv) * a->table_stride + page) * most * group + r] =
            (float)sum;
    }
}

kvant_status host_page_offsets(const kvant_cuda_page_offsets_args *args, kvant_cuda_stream stream)
{
    ANSWER(page_offsets, args, stream);
    if (!args->q || !args->lengths || !args->offsets || args->table_stride == 0 ||
        args->n_kv_heads == 0 || args->n_heads == 0 || args->n_heads % args->n_kv_heads ||
        !is_valid(&args->block_centers, args->head_dim))
        return KVANT_ERR_ARGUMENT;
    for (uint32_t b = 0; b < args->batch; b++)
        for (uint32_t kv = 0; kv < args->n_kv_heads; kv++)
            for (size_t page = 0;
                 page < args->table_stride && (int64_t)page * TOKENS < args->lengths[b]; page++)
                offsets_of(args, b, kv, page);
    return KVANT_OK;
}
