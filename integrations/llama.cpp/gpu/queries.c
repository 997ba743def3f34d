/* queries.c - keeps queries of prompts, from which first key transforms are learned (learner.c).
 *
 * While the graph of a batch of 64 tokens or more runs, 64 of its queries are copied within GPU
 * memory, layer by layer. Graphs of few tokens are captured and copy none. */
#include "learner.h"

#include <string.h>

bool kvp_gpu_fits_free_memory(const kvp_gpu *gpu, size_t bytes)
{
    size_t unused, total;

    return kvp_gpu_enter(gpu) &&
           kvp_cu_ok(kvp_cu.memory_info(&unused, &total), "asking for its memory") &&
           bytes < unused / 4;
}

static char *place_of(const kvp_gpu_cells *cells, uint32_t batch)
{
    const kvp_gpu_kept_queries *kept = &cells->cache->kept_queries;

    return (char *)kept->batches[batch].at +
           kvp_gpu_learning_layer(cells->cache, cells) * KVP_KEPT_TOKENS * kept->row;
}

/* Notes the tokens of a batch, at its first layer. */
static void note_batch(kvp_gpu_backend *b, kvp_gpu_kept_queries *kept, size_t n)
{
    const int32_t *positions = kvp_gpu_positions_at(b->gpu, b->positions, n);
    const uint32_t batch = kept->n++ % KVP_KEPT_BATCHES;

    for (size_t i = 0; i < KVP_KEPT_TOKENS; i++)
        kept->positions[batch * KVP_KEPT_TOKENS + i] =
            positions != NULL ? positions[i * (n / KVP_KEPT_TOKENS)] : -1;
}

/* Makes room for a batch. New memory holds anything: a lesson reads a layer's queries only if the
 * layer kept all batches. Clearing it would let the computer wait for the GPU in the midst of a
 * prompt. Memory that grows loses its contents. With -sm tensor layers join the cache in the midst
 * of a batch, and then the layers before them learn from keys only. */
static bool have_batch(kvp_gpu_cache *cache, uint32_t batch)
{
    const size_t bytes =
        kvp_gpu_learning_layer(cache, NULL) * KVP_KEPT_TOKENS * cache->kept_queries.row;
    kvp_gpu_memory *memory = &cache->kept_queries.batches[batch];

    if (memory->bytes >= bytes)
        return true;
    if (memory->at != NULL)
        kvp_gpu_queries_forget(cache);
    return kvp_gpu_fits_free_memory(cache->gpu, bytes) &&
           kvp_gpu_grow(cache->gpu, memory, bytes, false);
}

bool kvp_gpu_queries_keep(kvp_gpu_backend *b, const abi_tensor *node)
{
    kvp_gpu_cells *cells = kvp_gpu_cells_of(node->src[1]);
    kvp_gpu_cache *cache = cells->cache;
    kvp_gpu_kept_queries *kept = &cache->kept_queries;
    const abi_tensor *q = node->src[0];
    const size_t n = (size_t)q->ne[1], row = q->nb[1];
    cu_copy_2d rows = { .from_type = CU_MEMORY_DEVICE,
                        .from_device = (cu_address)(uintptr_t)q->data,
                        .from_pitch = n / KVP_KEPT_TOKENS * row,
                        .to_type = CU_MEMORY_DEVICE,
                        .to_pitch = row,
                        .width = row,
                        .height = KVP_KEPT_TOKENS };

    if (n < KVP_KEPT_TOKENS || q->ne[3] != 1 || (size_t)q->ne[2] * q->nb[2] != row ||
        (kept->row != 0 && kept->row != row))
        return true; /* the layer learns from keys only */
    kept->row = row;
    if (kept->alike && cells->n_kept_batches == kept->n)
        kvp_gpu_queries_forget(cache);
    if (!have_batch(cache, cells->n_kept_batches % KVP_KEPT_BATCHES))
        return true;
    if (cells->n_kept_batches == kept->n)
        note_batch(b, kept, n);
    rows.to_device =
        (cu_address)(uintptr_t)place_of(cells, cells->n_kept_batches++ % KVP_KEPT_BATCHES);
    return kvp_cu_ok(kvp_cu.copy_2d(&rows, b->gpu->stream), "copying");
}

/* Finds the queries of a layer, unless their tokens are too much alike. If the layer missed a
 * batch, it has queries of tokens whose positions are not known. */
void kvp_gpu_queries_find(const kvp_gpu_cells *cells, kvp_gpu_learner_input *lesson)
{
    const kvp_gpu_kept_queries *kept = &cells->cache->kept_queries;

    lesson->n_batches = kept->n < KVP_KEPT_BATCHES ? kept->n : KVP_KEPT_BATCHES;
    lesson->n_batches = cells->n_kept_batches == kept->n && !kept->alike ? lesson->n_batches : 0;
    lesson->row = kept->row;
    for (uint32_t i = 0; i < lesson->n_batches; i++)
        lesson->queries[i] = place_of(cells, i);
    memcpy(lesson->query_positions, kept->positions, sizeof(lesson->query_positions));
}

void kvp_gpu_queries_forget(kvp_gpu_cache *cache)
{
    cache->kept_queries.n = 0;
    cache->kept_queries.alike = false;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->n_kept_batches = 0;
    }
}

bool kvp_gpu_queries_unneeded(const kvp_gpu_cache *cache)
{
    const bool any = cache->kept_queries.batches[0].at != NULL ||
                     cache->kept_queries.keys.at != NULL ||
                     cache->kept_queries.workspace.at != NULL;

    return any && cache->learns_key_transform && !cache->lacks_key_transform &&
           !cache->lesson.begun && !cache->late.any;
}

void kvp_gpu_queries_free(kvp_gpu_cache *cache)
{
    kvp_gpu_queries_forget(cache);
    for (uint32_t i = 0; i < KVP_KEPT_BATCHES; i++)
        kvp_gpu_release(&cache->kept_queries.batches[i]);
    kvp_gpu_release(&cache->kept_queries.keys);
    kvp_gpu_release(&cache->kept_queries.workspace);
}
