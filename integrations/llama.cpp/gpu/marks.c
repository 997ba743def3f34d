/* marks.c - rows that a GPU refused (../invalid.h).
 *
 * When a kernel refuses a row, it marks the row's cell in GPU memory. A kernel behind attention
 * gives NaN to tokens that see a marked cell. Both happen within one graph, without the computer.
 * When a graph is done and a row was refused, the marked cells become invalid in all tensors of the
 * cache. Before a graph, cells that the graph writes become valid, and the GPU gets the marks of
 * all invalid cells. Some of these got their rows from the computer's memory.
 *
 * While no cell is invalid, the marks cost a copy and a launch per cache in a graph of a few
 * tokens. Its last attention gives marks to the cells of all tokens that saw one (attention.c). In
 * other graphs they cost a launch per attention node. */
#include "gpu.h"

#include <stdlib.h>
#include <string.h>

#define WORD_BITS 32u /* marks in a word, which kernels set with 32-bit atomics */

static size_t n_cells_of(const kvp_gpu_cache *cache)
{
    return (size_t)cache->n_blocks * KVANT_PAGE_TOKENS;
}

/* The marks are a word that says whether there are any, and a bit per cell. */
static size_t n_words(const kvp_gpu_cache *cache)
{
    return 1 + n_cells_of(cache) / WORD_BITS;
}

/* The cell numbers of a graph of a few tokens lie behind these words. */
static size_t numbers_at(const kvp_gpu_cache *cache)
{
    return (n_words(cache) + 1) / 2 * sizeof(int64_t);
}

int64_t *kvp_gpu_marks_cells(const kvp_gpu_cache *cache)
{
    return (int64_t *)(void *)((char *)cache->marks.memory.at + numbers_at(cache));
}

bool kvp_gpu_marks_create(kvp_gpu_cache *cache)
{
    struct kvp_gpu_marks *marks = &cache->marks;

    if (marks->host != NULL)
        return true;
    marks->host = calloc(2 * n_words(cache), sizeof(*marks->host));
    return marks->host != NULL &&
           kvp_gpu_grow(cache->gpu, &marks->memory,
                        numbers_at(cache) + KVP_SHORT_STEP_TOKENS * sizeof(int64_t), true);
}

void kvp_gpu_marks_free(kvp_gpu_cache *cache)
{
    kvp_gpu_release(&cache->marks.memory);
    free(cache->marks.host);
    cache->marks.host = NULL;
}

/* Makes cells invalid that the GPU marked since the last call; returns their number. */
static size_t read_new(kvp_gpu_cache *cache, const uint32_t *words, size_t *first)
{
    uint32_t *host = cache->marks.host;
    size_t n = 0;

    for (size_t cell = 0; cell < n_cells_of(cache); cell++) {
        const size_t word = 1 + cell / WORD_BITS;
        if (words[word] == host[word])
            cell |= WORD_BITS - 1;
        else if ((words[word] & ~host[word]) >> cell % WORD_BITS & 1) {
            *first = n++ == 0 ? cell : *first;
            for (size_t i = 0; i < cache->n_tensors; i++)
                kvp_invalid_set(&cache->tensors[i]->invalid, cell, 1, true);
        }
    }
    memcpy(host, words, n_words(cache) * sizeof(*host));
    return n;
}

bool kvp_gpu_marks_notice(kvp_gpu_cache *cache, kvant_status why)
{
    const void *marks = cache->marks.memory.at;
    cu_stream stream = cache->gpu->stream;
    uint32_t any = 0, *words = cache->marks.host + n_words(cache);
    size_t first = 0, n;

    if (!kvp_cu_read(&any, marks, sizeof(any), stream))
        return false;
    if (any == 0)
        return true;
    if (!kvp_cu_read(words, marks, n_words(cache) * sizeof(*words), stream))
        return false;
    if (!kvp_gpu_marks_any(cache))
        atomic_fetch_add(&cache->gpu->epoch, 1); /* captured graphs write too few outputs */
    n = read_new(cache, words, &first);
    if (n > 0) {
        const kvp_refusal refusal = { .name = cache->gpu->name,
                                      .cell = first,
                                      .n = n,
                                      .why = kvant_strerror(why),
                                      .by_graph = true };
        kvp_invalid_report(&refusal);
    }
    return true;
}

void kvp_gpu_marks_notice_all(kvp_gpu *gpu, kvant_status why)
{
    for (kvp_gpu_cache *cache = gpu->caches; why != KVANT_OK && cache != NULL; cache = cache->next)
        kvp_gpu_marks_notice(cache, why);
}

bool kvp_gpu_marks_any(const kvp_gpu_cache *cache)
{
    return cache->marks.host[0] != 0;
}

/* Collects the cells that are invalid in some tensor of the cache. */
static void collect(const kvp_gpu_cache *cache, uint32_t *words)
{
    memset(words, 0, n_words(cache) * sizeof(*words));
    for (size_t i = 0; i < cache->n_tensors; i++) {
        const kvp_invalid *invalid = &cache->tensors[i]->invalid;
        for (size_t w = 0;
             invalid->n > 0 && w < n_words(cache) - 1 && w < 2 * (invalid->n_cells / 64 + 1); w++)
            words[1 + w] |= (uint32_t)(invalid->bits[w / 2] >> w % 2 * WORD_BITS);
        words[0] |= invalid->n > 0;
    }
}

/* Copies the graph's cell numbers. When its last attention looks for marks, the graph's own input
 * may be gone, because ggml gives the memory to other tensors. Numbers of a known step come from
 * the computer's memory: a copy within the GPU's memory takes the computer longer to start, and the
 * GPU waits for the computer between two tokens. */
static bool keep_numbers(const kvp_gpu_cache *cache, const abi_tensor *cells,
                         const kvp_gpu_step *step, cu_stream stream)
{
    int64_t *to = kvp_gpu_marks_cells(cache);
    const size_t n = (size_t)cells->ne[0];

    if (n > KVP_SHORT_STEP_TOKENS)
        return true;
    if (step != NULL)
        return kvp_cu_write(to, step->cells, n * sizeof(int64_t), stream);
    return kvp_cu_move(to, cells->data, n * sizeof(int64_t), stream);
}

bool kvp_gpu_marks_prepare(kvp_gpu_cache *cache, const abi_tensor *cells, const kvp_gpu_step *step,
                           cu_stream stream)
{
    uint32_t *host = cache->marks.host, *words = host + n_words(cache);
    const size_t bytes = n_words(cache) * sizeof(*words);

    for (size_t t = 0; step != NULL && t < cache->n_tensors; t++)
        for (size_t i = 0; cache->tensors[t]->invalid.n > 0 && i < step->n; i++)
            kvp_invalid_set(&cache->tensors[t]->invalid, (size_t)step->cells[i], 1, false);
    collect(cache, words);
    if (!keep_numbers(cache, cells, step, stream))
        return false;
    if (memcmp(words, host, bytes) == 0)
        return true;
    if (words[0] != host[0])
        atomic_fetch_add(&cache->gpu->epoch,
                         1); /* captured graphs write too few outputs, or too many */
    memcpy(host, words, bytes);
    return kvp_cu_write(cache->marks.memory.at, host, bytes, stream) &&
           kvp_cu_finish(stream, "copying");
}
