/* prefetch.c - asks for the memory in which a step of one token finds the state of a tensor.
 *
 * A model reads all of its weights between two steps of a layer, so this state has left the
 * caches. It is a few hundred lines, which one thread would ask for one after another while all
 * other threads wait. */
#include <kvant/tensor_hooks.h>

#include "../base/attributes.h"
#include "center.h"
#include "learning.h"

static void fetch(const void *at, size_t bytes)
{
    for (size_t i = 0; at && i < bytes; i += 64)
        KVANT_PREFETCH((const char *)at + i);
}

/* The part of the statistics to which the next row is added. */
static void fetch_statistics(const kvant_statistics *s)
{
    const size_t at = s->n % KVANT_STATISTICS_PARTS * s->width, bytes = s->width * sizeof *s->sum;
    if (!s->sum)
        return;
    fetch(s->sum + at, bytes);
    fetch(s->min + at, bytes);
    fetch(s->max + at, bytes);
}

/* The memory to which the tensor points. */
static void fetch_state(const kvant_tensor *tensor, uint32_t block)
{
    const kvant_tensor_transform *newest = &tensor->transforms[tensor->newest];
    fetch(&tensor->blocks[block], sizeof *tensor->blocks);
    fetch(tensor->open_pages, tensor->n_open_pages * sizeof *tensor->open_pages);
    fetch(tensor->learning, sizeof *tensor->learning);
    fetch(newest->center, kvant_tensor_width(tensor) * sizeof *newest->center);
    fetch(newest->key_transform, sizeof *newest->key_transform);
    fetch_statistics(&tensor->recent);
    if (tensor->plan)
        kvant_plan_prefetch(tensor->plan);
}

/* The places of the next row and of the next queries. */
static void fetch_learning(const kvant_tensor *tensor)
{
    const kvant_learning *l = tensor->learning;
    const size_t width = kvant_tensor_width(tensor), queries = l->pending_heads * tensor->head_dim;
    fetch(l->sub_heads, l->n_sub_heads * sizeof *l->sub_heads);
    fetch(l->rope, sizeof *l->rope);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        fetch(l->queries +
                  (head * SAMPLE_QUERIES + l->n_queries[head] % SAMPLE_QUERIES) * tensor->head_dim,
              tensor->head_dim * sizeof *l->queries);
    if (l->rows)
        fetch(l->rows + l->n_rows * width, width * sizeof *l->rows);
    if (l->pending_queries)
        fetch(l->pending_queries + l->n_pending_tokens * queries,
              queries * sizeof *l->pending_queries);
}

/* The memory to which this state points. */
static void fetch_details(const kvant_tensor *tensor, uint32_t block)
{
    const kvant_key_transform *w = tensor->transforms[tensor->newest].key_transform;
    const uint32_t sequence = tensor->blocks[block].sequence;
    fetch(&tensor->clocks[sequence], sizeof *tensor->clocks);
    fetch(&tensor->begun[sequence], sizeof *tensor->begun);
    for (uint32_t i = 0; i < tensor->n_open_pages; i++) {
        const int64_t open = tensor->open_pages[i].block;
        if (open >= 0)
            fetch(&tensor->blocks[open], sizeof *tensor->blocks);
        if (open >= 0 && tensor->plan)
            kvant_plan_prefetch_block(tensor->plan, (uint32_t)open);
    }
    if (w && w->centers)
        fetch(w->centers, kvant_centers_bytes(tensor));
    if (tensor->learning)
        fetch_learning(tensor);
}

void kvant_tensor_prefetch(const kvant_tensor *tensor, int64_t slot, uint32_t ahead)
{
    if (!tensor || tensor->device || slot < 0 || slot / KVANT_PAGE_TOKENS >= tensor->n_blocks)
        return;
    if (ahead == 1)
        fetch_details(tensor, (uint32_t)(slot / KVANT_PAGE_TOKENS));
    else if (ahead == 2)
        fetch_state(tensor, (uint32_t)(slot / KVANT_PAGE_TOKENS));
    else
        fetch(tensor, sizeof *tensor);
}
