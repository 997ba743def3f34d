/* steps.c - open pages that tensors share: which tensor owns them, and where its rows go when another
 * tensor needs them.
 *
 * Does not decide which blocks are open, or what is sealed first: open.c does. */
#include "tensor.h"

size_t kvant_steps_blocks(const kvant_step_pages *steps, size_t open_block_bytes)
{
    return steps->bytes / open_block_bytes;
}

/* False when the tensor has no page of its own that is free. */
static bool move_to_own(kvant_tensor *tensor, uint32_t page)
{
    uint32_t to = tensor->n_sink_pages;
    while (to < tensor->n_own_pages && tensor->open_pages[to].block >= 0)
        to++;
    if (to == tensor->n_own_pages)
        return false;
    memcpy(kvant_open_page_of(tensor, (int32_t)to, 0), kvant_open_page_of(tensor, (int32_t)page, 0),
           kvant_open_block_bytes(tensor));
    tensor->open_pages[to] = tensor->open_pages[page];
    tensor->open_pages[page].block = -1;
    tensor->blocks[tensor->open_pages[to].block].open_page = (int32_t)to;
    return true;
}

/* The step of the tensor is over: it seals what its next write would seal first. Rows that wait for
 * their first transform are sealed only where there is no room for them. */
static void leave(kvant_tensor *tensor, uint32_t n_threads)
{
    if (!kvant_versions_wait(tensor))
        kvant_open_seal_due(&tensor, 1, false, n_threads);
    for (uint32_t page = tensor->n_own_pages; page < tensor->n_open_pages; page++)
        while (tensor->open_pages[page].block >= 0 && !move_to_own(tensor, page))
            kvant_open_seal_first(tensor, n_threads);
}

void kvant_steps_acquire(kvant_tensor *tensor, uint32_t n_threads)
{
    kvant_tensor *owner = tensor->steps->owner;
    if (owner && owner != tensor)
        leave(owner, n_threads);
    tensor->steps->owner = tensor;
}

void kvant_steps_release(kvant_tensor *tensor)
{
    if (tensor->steps && tensor->steps->owner == tensor)
        tensor->steps->owner = NULL;
}
