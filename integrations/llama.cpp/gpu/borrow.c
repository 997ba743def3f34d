/* borrow.c - pages that a first batch borrows while its keys wait for a matrix (wait.c).
 *
 * The cache was empty before. So blocks get borrowed pages in the order in which they come, each
 * keeps its page until the batch waits no more, and cells count up as positions do. The plan does
 * not know of these pages. */
#include "gpu.h"

static int64_t free_page(const kvp_gpu_cache *cache)
{
    for (uint32_t i = 0; i < cache->n_pages; i++)
        if (cache->pages[i].block == KVP_NO_PAGE)
            return i;
    return -1;
}

void kvp_gpu_borrow(kvp_gpu_cache *cache, const kvp_gpu_step *step)
{
    for (size_t i = 0; i < step->n; i++) {
        const int64_t page = kvp_gpu_page_of(cache, step->cells[i]) < 0 ? free_page(cache) : -1;
        if (page >= 0)
            kvp_gpu_put_page(cache, (uint32_t)page, (int32_t)(step->cells[i] / KVANT_PAGE_TOKENS));
    }
}

/* How many blocks of its stream come before a block. */
static uint32_t place_of(const kvp_gpu_cache *cache, int32_t block)
{
    return (uint32_t)block % (cache->n_blocks / cache->n_streams);
}

bool kvp_gpu_page_stays(const kvp_gpu_cache *cache, uint32_t page)
{
    const int32_t block = cache->pages[page].block;
    const uint32_t at = place_of(cache, block), per_stream = cache->n_blocks / cache->n_streams;
    uint32_t behind = 0;

    while (at + behind + 1 < per_stream && cache->written[block + (int32_t)behind + 1] != 0)
        behind++;
    return at * KVANT_PAGE_TOKENS < cache->exact.first ||
           (behind > 0 ? behind - 1 : 0) * KVANT_PAGE_TOKENS < cache->exact.newest;
}

void kvp_gpu_assign_page(kvp_gpu_cache *cache, uint32_t page, int32_t block)
{
    const uint64_t written = cache->written[block];
    uint32_t rows[2] = { 0, KVANT_PAGE_TOKENS - 1 }; /* the first and the last one */
    int64_t cells[2];
    int32_t positions[2];

    while (rows[0] < rows[1] && !(written >> rows[0] & 1))
        rows[0]++;
    while (rows[0] < rows[1] && !(written >> rows[1] & 1))
        rows[1]--;
    for (int i = 0; i < 2; i++) {
        cells[i] = (int64_t)block * KVANT_PAGE_TOKENS + rows[i];
        positions[i] = (int32_t)(place_of(cache, block) * KVANT_PAGE_TOKENS + rows[i]);
    }
    /* Pages are assigned in their order, so the plan gives the block the same page. */
    kvant_plan_step_rows(cache->plan, &(kvant_plan_step){ cells, positions, 2, NULL, 0 });
    kvp_gpu_put_page(cache, page, block);
}
