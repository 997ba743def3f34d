/* fetch.c - copies rows, queries and positions to the computer's memory, where transforms are
 * learned. */
#include "learner.h"

#include "../ggml_api.h"

static bool have_memory(struct kvp_gpu_fetched *fetched, size_t bytes)
{
    void *memory = NULL;

    if (bytes <= fetched->bytes)
        return true;
    if (!kvp_cu_ok(kvp_cu.host_memory_new(&memory, bytes, CU_HOST_PORTABLE_MAPPED),
                   "allocating host memory"))
        return false;
    if (fetched->at != NULL)
        kvp_cu.host_memory_free(fetched->at);
    *fetched = (struct kvp_gpu_fetched){ memory, bytes };
    return true;
}

bool kvp_gpu_fetch(kvp_gpu_backend *b, kvp_fetched kind, const abi_tensor *from, abi_tensor *to)
{
    struct kvp_gpu_fetched *memory = &b->fetched[kind];
    const size_t bytes = kvp_api.nbytes(from);

    if (!have_memory(memory, bytes))
        return false;
    *to = *from;
    to->data = memory->at;
    return kvp_cu_ok(
               kvp_cu.copy_out(to->data, (cu_address)(uintptr_t)from->data, bytes, b->gpu->stream),
               "copying") &&
           kvp_cu_ok(kvp_cu.stream_finish(b->gpu->stream), "copying");
}

void kvp_gpu_fetch_release(kvp_gpu_backend *b)
{
    for (int kind = 0; kind < KVP_N_FETCHED; kind++)
        if (b->fetched[kind].at != NULL)
            kvp_cu.host_memory_free(b->fetched[kind].at);
}

/* Copies that threads make */

bool kvp_gpu_ensure_copy_stream(kvp_gpu *gpu)
{
    return gpu->copying != NULL ||
           kvp_cu_ok(kvp_cu.stream_new(&gpu->copying, CU_NON_BLOCKING), "creating a stream");
}

void kvp_gpu_copying_release(kvp_gpu *gpu)
{
    for (const kvp_gpu_cache *cache = gpu->caches; cache != NULL; cache = cache->next)
        for (size_t i = 0; i < cache->n_tensors; i++) {
            const kvp_gpu_cells *cells = cache->tensors[i]->cells;
            if (cells->learner != NULL)
                kvp_gpu_learner_finish(cells->learner);
        }
    if (gpu->copying != NULL)
        kvp_cu.stream_free(gpu->copying);
    gpu->copying = NULL;
}
