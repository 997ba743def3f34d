/* centers.c - centres of blocks of keys with a key transform, as in src/cache/center.h.
 *
 * A position bucket (buckets.c) keeps the mean of keys at positions 0 to 63. A block's centre is
 * this mean, rotated by RoPE to the position of the block's first cell. The rotation, called the
 * block's phase, is computed here and lies in GPU memory for all layers. Blocks at unknown
 * positions share the mean of their bucket, which has its own number and does not rotate. Centres
 * are subtracted from rows before they are stored, and added when rows are decoded. Attention gets
 * the products of each query with each block's centre (kvant_cuda_page_offsets). */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#include "../rope.h"

/* Allocates what centres need on the GPU. If there is no memory once a transform is in force, exact
 * keys stay as the former transform left them. So this comes before any key has a centre. */
static bool begin(kvp_gpu_cache *cache, cu_stream stream)
{
    kvp_gpu_centers *centers = &cache->buckets.centers;
    const size_t n = (size_t)cache->n_blocks * centers->head_dim;
    uint16_t pairs[KVANT_MAX_HEAD_DIM];
    float phase[KVANT_MAX_HEAD_DIM];

    if (centers->host != NULL)
        return true;
    centers->host = malloc(n * sizeof(*centers->host));
    centers->first = 0;
    centers->end = cache->n_blocks;
    if (centers->host != NULL &&
        kvant_rope_phase(&centers->rope, centers->head_dim, 0, phase, pairs) == KVANT_OK &&
        kvp_gpu_grow(cache->gpu, &centers->phases, n * sizeof(*centers->host), false) &&
        kvp_gpu_grow(cache->gpu, &centers->pairs, centers->head_dim * sizeof(*pairs), false) &&
        kvp_cu_write(centers->pairs.at, pairs, centers->head_dim * sizeof(*pairs), stream))
        return true;
    free(centers->host); /* the next call begins again */
    centers->host = NULL;
    return false;
}

bool kvp_gpu_centers_set_rope(const kvp_kv *kv, const abi_tensor *rows)
{
    const kvp_gpu_cells *cells = kv->cells;
    kvp_gpu_centers *centers = &cells->cache->buckets.centers;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_rope rope;
    bool even;

    if (!kvp_rope_read(kv, rows, &rope, frequencies))
        return false;
    if (centers->rope.size == 0) {
        memcpy(centers->frequencies, frequencies, rope.n_dims / 2 * sizeof(*frequencies));
        centers->head_dim = cells->head_dim;
        centers->rope = rope;
        centers->rope.frequencies = centers->frequencies;
    }
    even = centers->head_dim == cells->head_dim && kvp_rope_is_same(&centers->rope, &rope);
    centers->uneven = centers->uneven || !even;
    return even && !cells->uncentred && begin(cells->cache, cells->gpu->stream);
}

/* Notes that the phase of a block has changed. */
static void note_change(kvp_gpu_centers *centers, size_t block)
{
    centers->first = block < centers->first ? (uint32_t)block : centers->first;
    centers->end = block >= centers->end ? (uint32_t)block + 1 : centers->end;
}

void kvp_gpu_centers_assign(kvp_gpu_cache *cache, size_t block, int32_t position)
{
    kvp_gpu_centers *centers = &cache->buckets.centers;
    const int32_t former = centers->positions[block];

    if (former == position)
        return;
    cache->buckets.changed =
        cache->buckets.changed || former == KVP_NO_POSITION || position == KVP_NO_POSITION;
    centers->positions[block] = position;
    note_change(centers, block);
}

void kvp_gpu_centers_move(kvp_gpu_cache *cache, size_t block, int32_t by)
{
    kvp_gpu_centers *centers = &cache->buckets.centers;

    if (centers->positions[block] != KVP_NO_POSITION)
        centers->positions[block] += by;
    note_change(centers, block);
}

void kvp_gpu_centers_copy(kvp_gpu_cache *cache, size_t block, size_t to)
{
    kvp_gpu_centers_assign(cache, to, cache->buckets.centers.positions[block]);
    note_change(&cache->buckets.centers, to);
}

/* Phases */

/* Fills the phase of a block. If its position is unknown, its centre is the mean of its bucket,
 * rotated as far as the block's keys have moved. */
static void fill(const kvp_gpu_buckets *buckets, size_t block, float *phase)
{
    const kvp_gpu_centers *centers = &buckets->centers;
    const int32_t position = centers->positions[block],
                  by = buckets->lineages[buckets->of[block]].by;

    kvant_rope_phase(&centers->rope, centers->head_dim, position == KVP_NO_POSITION ? by : position,
                     phase, NULL);
}

bool kvp_gpu_centers_upload(kvp_gpu_cache *cache, cu_stream stream)
{
    kvp_gpu_centers *centers = &cache->buckets.centers;
    const size_t d = centers->head_dim;
    bool ok;

    if (!begin(cache, stream))
        return false;
    if (centers->first >= centers->end)
        return true;
    for (uint32_t block = centers->first; block < centers->end; block++)
        fill(&cache->buckets, block, centers->host + block * d);
    ok = kvp_cu_write((float *)centers->phases.at + centers->first * d,
                      centers->host + centers->first * d,
                      (centers->end - centers->first) * d * sizeof(float), stream);
    if (ok) {
        centers->first = cache->n_blocks;
        centers->end = 0;
    }
    return ok;
}

/* Rows and queries */

kvant_cuda_block_centers kvp_gpu_block_centers_of(const kvp_gpu_cells *keys, size_t first_block)
{
    const kvp_gpu_buckets *buckets = &keys->cache->buckets;

    return (kvant_cuda_block_centers){
        .pairs = buckets->centers.pairs.at,
        .start = keys->starts.at,
        .phases = (const float *)buckets->centers.phases.at + first_block * keys->head_dim,
        .transform_ids = (const uint8_t *)buckets->numbers.at + keys->cache->n_blocks + first_block
    };
}

kvant_status kvp_gpu_center_rows(const kvp_gpu_cells *keys, const float *rows, size_t stride,
                                 size_t n, const int64_t *cells, bool add, float *out)
{
    const kvant_cuda_center_rows_args args = { .size = sizeof(args),
                                               .rows = rows,
                                               .type = KVANT_CUDA_F32,
                                               .token_stride = stride,
                                               .head_stride = keys->head_dim,
                                               .n_tokens = (uint32_t)n,
                                               .n_kv_heads = keys->n_kv_heads,
                                               .head_dim = keys->head_dim,
                                               .slots = cells,
                                               .block_centers = kvp_gpu_block_centers_of(keys, 0),
                                               .add = add,
                                               .out = out };

    return keys->has_block_centers ? kvant_cuda_center_rows(&args, keys->gpu->stream) : KVANT_OK;
}

kvant_status kvp_gpu_center_blocks(const kvp_gpu_cells *keys, bool open, size_t first, size_t n,
                                   bool add, float *rows)
{
    kvp_gpu_cache *cache = keys->cache;
    const size_t n_rows = n * KVANT_PAGE_TOKENS;
    int64_t short_step[KVANT_PAGE_TOKENS],
        *cells = short_step; /* of one block, which a shift must not fail at */
    bool ok;

    if (!keys->has_block_centers)
        return KVANT_OK;
    if (n > 1)
        cells = malloc(n_rows * sizeof(*cells));
    ok = cells != NULL && kvp_gpu_buckets_upload(cache, cache->gpu->stream) &&
         kvp_gpu_grow(cache->gpu, &cache->moved, n_rows * sizeof(*cells), false);
    for (size_t i = 0; i < n_rows && ok; i++) {
        const int64_t block = kvp_gpu_block_at(cache, open, first + i / KVANT_PAGE_TOKENS);
        cells[i] = block < 0 ? -1 : block * KVANT_PAGE_TOKENS + (int64_t)(i % KVANT_PAGE_TOKENS);
    }
    ok = ok && kvp_cu_write(cache->moved.at, cells, n_rows * sizeof(*cells), cache->gpu->stream);
    if (n > 1)
        free(cells);
    return ok ? kvp_gpu_center_rows(keys, rows, kvp_gpu_width(keys), n_rows, cache->moved.at, add,
                                    rows)
              : KVANT_ERR_MEMORY;
}

/* Life */

void kvp_gpu_centers_forget(kvp_gpu_cache *cache)
{
    for (uint32_t block = 0; block < cache->n_blocks; block++)
        kvp_gpu_centers_assign(cache, block, KVP_NO_POSITION);
    cache->buckets.centers.used = false;
}

void kvp_gpu_centers_free(kvp_gpu_cache *cache)
{
    kvp_gpu_centers *centers = &cache->buckets.centers;

    kvp_gpu_release(&centers->phases);
    kvp_gpu_release(&centers->pairs);
    free(centers->host);
    free(centers->positions);
}
