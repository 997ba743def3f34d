/* steps.c - open pages that tensors share: which tensor owns them, and where its rows go when
 * another tensor needs them.
 *
 * Does not decide which blocks are open, or what is sealed first: open.c does. */
#include "tensor.h"

size_t kvant_steps_blocks(const kvant_step_pages *steps, size_t open_block_bytes)
{
    return steps->bytes / open_block_bytes;
}

bool kvant_steps_may_own(const kvant_tensor *tensor, uint32_t sequence)
{
    uint32_t n = 0;
    for (uint32_t i = tensor->n_sink_pages; i < tensor->n_own_pages && tensor->steps; i++) {
        const int64_t block = tensor->open_pages[i].block;
        n += block >= 0 && tensor->blocks[block].sequence == sequence;
    }
    return !tensor->steps || n < tensor->share;
}

/* The first free page that is the tensor's own, or n_own_pages. */
static uint32_t free_own_page(const kvant_tensor *tensor)
{
    uint32_t page = tensor->n_sink_pages;
    while (page < tensor->n_own_pages && tensor->open_pages[page].block >= 0)
        page++;
    return page;
}

static void move(kvant_tensor *tensor, uint32_t page, uint32_t to)
{
    memcpy(kvant_open_page_of(tensor, (int32_t)to, 0), kvant_open_page_of(tensor, (int32_t)page, 0),
           kvant_open_block_bytes(tensor));
    tensor->open_pages[to] = tensor->open_pages[page];
    tensor->open_pages[page].block = -1;
    tensor->blocks[tensor->open_pages[to].block].open_page = (int32_t)to;
}

/* Moves the rows of a shared page to an own page, or seals them. Others give way: those of the same
 * sequence where it has its share. */
static void vacate(kvant_tensor *tensor, uint32_t page, uint32_t n_threads)
{
    const int64_t block = tensor->open_pages[page].block;
    const uint32_t sequence = block >= 0 ? tensor->blocks[block].sequence : 0;
    while (tensor->open_pages[page].block >= 0) {
        const uint32_t to = free_own_page(tensor);
        if (!kvant_steps_may_own(tensor, sequence))
            kvant_open_seal_first(tensor, sequence, n_threads);
        else if (to == tensor->n_own_pages)
            kvant_open_seal_first(tensor, KVANT_ALL_SEQUENCES, n_threads);
        else
            move(tensor, page, to);
    }
}

/* The step of the tensor is over: it seals what its next write would seal first. Rows that wait for
 * their first transform are sealed only where there is no room for them. */
static void leave(kvant_tensor *tensor, uint32_t n_threads)
{
    if (!kvant_versions_wait(tensor))
        kvant_open_seal_due(&tensor, 1, false, n_threads);
    for (uint32_t page = tensor->n_own_pages; page < tensor->n_open_pages; page++)
        vacate(tensor, page, n_threads);
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
