/* size.c - what a cache tensor on a GPU takes next to its pages, from its shape alone (kv_size.h).
 *
 * Needs no GPU, so that `kvant inspect` can tell a GPU's sizes on any machine. It does not count
 * tables of a few bytes for each token that all layers share (cell numbers, page tables, refused
 * cells), and room for one batch. */
#include "gpu.h"

/* Ranges of positions after the first one that a cache of this shape makes matrices for. A cache of
 * no more than KVP_FIRST_RANGE cells ends learning with its first matrix (first.c). */
static size_t further_ranges(const kvp_kv_shape *shape, uint32_t n_positions)
{
    size_t n = 0;

    if (shape->n_cells <= KVP_FIRST_RANGE)
        return 0;
    for (uint32_t range = 1; range < KVP_PLAIN; range++)
        n += (uint32_t)kvp_gpu_range_at(range).first < n_positions;
    return n;
}

size_t kvp_gpu_transform_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                               uint32_t n_kv_heads, uint32_t n_positions)
{
    kvant_codec_info info = { .size = sizeof(info) };
    bool learns;
    size_t weights, numbers;

    kvant_codec_get_info(codecs[0], &info);
    learns = info.learns_transform && shape->role == KVANT_ROLE_K;
    weights = learns ? (size_t)info.head_dim * info.head_dim : kvp_gpu_tables(codecs[0]).n_weights;
    /* `kvp_gpu_cells`: numbers, and key_center. */
    numbers = 2 * n_kv_heads * weights + 4 * (size_t)shape->row;
    if (learns) /* starts, and further */
        numbers += 2 * KVP_MOST_RANGES * (size_t)shape->row +
                   further_ranges(shape, n_positions) * 2 * n_kv_heads * weights;
    return numbers * sizeof(float);
}

/* Few caches need KVP_PLAIN. Those have its matrix from their first matrix on. */
size_t kvp_gpu_plain_bytes(const kvp_kv_shape *shape, const kvant_codec *const *codecs,
                           uint32_t n_kv_heads)
{
    kvant_codec_info info = { .size = sizeof(info) };

    kvant_codec_get_info(codecs[0], &info);
    if (!info.learns_transform || shape->role != KVANT_ROLE_K)
        return 0;
    return 2 * (size_t)n_kv_heads * info.head_dim * info.head_dim * sizeof(float);
}

/* Open pages of one layer as fp32 rows with their slots, while they take a matrix. */
size_t kvp_gpu_learning_room(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    const size_t row = shape->row * sizeof(float) + sizeof(int64_t);

    if (shape->role != KVANT_ROLE_K || !kvp_kv_learns(settings))
        return 0;
    return (size_t)kvp_kv_open_pages(shape, settings) * KVANT_PAGE_TOKENS * row;
}
