/* size.c - the bytes that a cache tensor on a GPU takes next to its pages, computed from its shape
 * (kv_size.h).
 *
 * Needs no GPU, so that `kvant inspect` can tell a GPU's sizes on any machine. It does not count
 * tables of a few bytes for each token that all layers share (cell numbers, page tables, refused
 * cells), and room for one batch. Nor does it count copies of queries and keys that a cache keeps
 * while it learns (queries.c, lesson.c): they are left out where little GPU memory is free. Nor
 * does it count a copy of one tensor's rows while they go from f16 in place to pages (hand_over.c).
 */
#include "gpu.h"

/* The number of further position buckets below n_positions for which a cache of this shape learns
 * key transforms. A cache of at most KVANT_LESSON_FIRST_BUCKET cells ends learning with its first
 * key transform (first_matrix.c). */
size_t kvp_gpu_further_buckets(const kvp_kv_shape *shape, uint32_t n_positions)
{
    size_t n = 0;

    if (shape->n_cells <= KVANT_LESSON_FIRST_BUCKET)
        return 0;
    for (uint32_t bucket = 1; bucket < KVP_PLAIN; bucket++)
        n += (uint32_t)kvant_lesson_bucket_at(bucket).first < n_positions;
    return n;
}

size_t kvp_gpu_transform_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                               uint32_t n_kv_heads, uint32_t n_positions)
{
    kvant_codec_info info = { .size = sizeof(info) };
    bool learns;
    size_t matrices, bytes;

    kvant_codec_get_info(codecs[0], &info);
    learns = info.learns_transform && shape->role == KVANT_ROLE_K;
    matrices = learns
                   ? kvant_cuda_compact_bytes(info.head_dim, n_kv_heads)
                   : 2 * n_kv_heads * kvp_gpu_tables(codecs[0]).key_transform_size * sizeof(float);
    /* numbers and key_center of kvp_gpu_cells */
    bytes = matrices + 4 * (size_t)shape->row * sizeof(float);
    if (learns) /* starts, further and results of kvp_gpu_cells */
        bytes += 2 * KVP_MOST_BUCKETS * (size_t)shape->row * sizeof(float) +
                 kvp_gpu_further_buckets(shape, n_positions) * matrices +
                 kvp_gpu_learned_bytes(info.head_dim, n_kv_heads,
                                       (uint32_t)kvp_gpu_further_buckets(shape, n_positions) + 1);
    return bytes;
}

/* The matrices of a layer that append and decode, or the two of KVP_PLAIN. */
size_t kvp_gpu_expanded_bytes(uint32_t n_kv_heads, uint32_t head_dim)
{
    return 2 * (size_t)n_kv_heads * head_dim * head_dim * sizeof(float);
}

size_t kvp_gpu_matrix_room(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                           uint32_t n_kv_heads)
{
    kvant_codec_info info = { .size = sizeof(info) };

    kvant_codec_get_info(codecs[0], &info);
    return info.learns_transform && shape->role == KVANT_ROLE_K
               ? kvp_gpu_expanded_bytes(n_kv_heads, info.head_dim)
               : 0;
}

/* KVP_PLAIN is counted separately, because few caches need it. A cache that needs it has its matrix
 * from its first key transform on. */
size_t kvp_gpu_plain_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                           uint32_t n_kv_heads)
{
    return kvp_gpu_matrix_room(shape, codecs, n_kv_heads); /* as many numbers */
}

size_t kvp_gpu_staging_bytes(const kvp_kv_shape *shape)
{
    return (size_t)kvp_gpu_most_staged(kvp_kv_blocks(shape)) * KVANT_PAGE_TOKENS * shape->row *
           sizeof(uint16_t);
}

size_t kvp_gpu_staging_room(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    return kvp_kv_may_have_groups(shape, settings) ? kvp_gpu_staging_bytes(shape) : 0;
}

/* The exact pages of one layer as fp32 rows with their slots, while their rows get another
 * transform, and the working memory of learning: of heads of 128 channels, which need most of
 * it. */
size_t kvp_gpu_learning_room(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    const size_t row = shape->row * sizeof(float) + sizeof(int64_t);

    if (shape->role != KVANT_ROLE_K || !kvp_kv_learns(settings))
        return 0;
    return (size_t)kvp_kv_open_pages(shape, settings) * KVANT_PAGE_TOKENS * row +
           kvp_gpu_learning_bytes(128, (shape->row + 127) / 128,
                                  1 + (uint32_t)kvp_gpu_further_buckets(shape, shape->n_cells));
}
