/* open.c - open (fp16) pages: sinks, which stay open, and the pool of pages that will be sealed.
 *
 * Open pages hold transformed rows, so sealing applies no rotation. A sealed slot that was not
 * rewritten while its block was open keeps its bytes: its codes are not computed again. Sealing
 * cannot fail for a written row: the row was checked for the sealed page before it was stored. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "../base/half.h"
#include "../base/parallel.h"
#include "center.h"
#include "weights.h"

#define ALL_SLOTS UINT64_MAX

/* A block's pages where the CPU can work on them: in the tensor's memory, or as copies of a
 * device's. */
typedef struct block_pages {
    uint8_t *open, *sealed; /* of the first kv head */
} block_pages;

static block_pages pages_in_place(const kvant_tensor *tensor, uint32_t block)
{
    return (block_pages){ kvant_open_page_of(tensor, tensor->blocks[block].open_page, 0),
                          kvant_sealed_page(tensor, block, 0) };
}

static block_pages borrow(const kvant_tensor *tensor, uint32_t block)
{
    const block_pages at = pages_in_place(tensor, block);
    if (!tensor->device)
        return at;
    const block_pages copy = { tensor->staging, tensor->staging + kvant_open_block_bytes(tensor) };
    kvant_pages_read(tensor, copy.open, at.open, kvant_open_block_bytes(tensor));
    kvant_pages_read(tensor, copy.sealed, at.sealed, tensor->block_bytes);
    return copy;
}

/* One of the two was changed. */
static void give_back(const kvant_tensor *tensor, uint32_t block, const block_pages *borrowed, bool sealed)
{
    const block_pages at = pages_in_place(tensor, block);
    if (!tensor->device)
        return;
    if (sealed)
        kvant_pages_copy(tensor, at.sealed, borrowed->sealed, tensor->block_bytes);
    else
        kvant_pages_copy(tensor, at.open, borrowed->open, kvant_open_block_bytes(tensor));
}

/* Sealing: units are (open page, kv head), since pages are independent. */

#define MOST_PAGES 64u /* sealed together */

typedef struct seal_job {
    kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const int32_t *pages;
    const block_pages *borrowed; /* of the only page, or NULL */
} seal_job;

/* Rows of block_tokens slots from an open page; slots that were never written take the numbers of
 * one that was, so that they widen no range. */
static void gather(const seal_job *job, const kvant_codec *codec, const void *page, uint64_t written, uint32_t first,
                   float *rows)
{
    uint32_t d = codec->info.head_dim, n = codec->info.block_tokens, stand_in = first;
    while (!(written >> stand_in & 1))
        stand_in++;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = written >> (first + i) & 1 ? first + i : stand_in;
        kvant_codec_decode_open(codec, job->kernels, page, slot, 1, rows + (size_t)i * d);
    }
}

static void seal_page(const seal_job *job, int32_t open, uint32_t head, float *scratch)
{
    kvant_tensor *tensor = job->tensor;
    uint32_t block = (uint32_t)tensor->open_pages[open].block;
    uint32_t n = kvant_tensor_codec_info(tensor)->block_tokens;
    const block_pages at = job->borrowed ? *job->borrowed : pages_in_place(tensor, block);
    uint64_t mask = ALL_SLOTS >> (KVANT_PAGE_TOKENS - n);
    for (uint32_t first = 0; first < KVANT_PAGE_TOKENS; first += n) {
        if (!(tensor->open_pages[open].fresh >> first & mask))
            continue;
        gather(job, tensor->codecs[head], at.open + head * tensor->open_page_bytes, tensor->blocks[block].written,
               first, scratch);
        kvant_codec_encode_transformed(tensor->codecs[head], job->kernels, scratch, first, n,
                                       at.sealed + tensor->page_offsets[head]);
    }
}

static void seal_unit(void *context, size_t unit, uint32_t worker)
{
    const seal_job *job = context;
    const kvant_tensor *tensor = job->tensor;
    size_t floats = (size_t)kvant_tensor_codec_info(tensor)->block_tokens * tensor->head_dim;
    seal_page(job, job->pages[unit / tensor->n_kv_heads], (uint32_t)(unit % tensor->n_kv_heads),
              tensor->scratch + worker * floats);
}

static void encode_pages(kvant_tensor *tensor, const int32_t *pages, size_t n, const block_pages *borrowed,
                         uint32_t n_threads)
{
    seal_job job = { tensor, kvant_kernels_get(KVANT_CPU_AUTO), pages, borrowed };
    kvant_parallel_for(n * tensor->n_kv_heads, n_threads < KVANT_SEAL_WORKERS ? n_threads : KVANT_SEAL_WORKERS,
                       seal_unit, &job);
}

/* Devices seal the first slots of a page. A block that was opened again, or came with gaps, is
 * sealed by the CPU. */
static void encode_on_device(kvant_tensor *tensor, const int32_t *pages, size_t n, uint32_t n_threads)
{
    int32_t plain[MOST_PAGES];
    size_t n_plain = 0;
    for (size_t i = 0; i < n; i++) {
        const kvant_open_page *open = &tensor->open_pages[pages[i]];
        const uint64_t written = tensor->blocks[open->block].written;
        if (open->fresh == written && !(written & (written + 1))) {
            plain[n_plain++] = pages[i];
            continue;
        }
        const block_pages borrowed = borrow(tensor, (uint32_t)open->block);
        encode_pages(tensor, &pages[i], 1, &borrowed, n_threads);
        give_back(tensor, (uint32_t)open->block, &borrowed, true);
    }
    if (n_plain)
        tensor->device->seal(tensor, plain, n_plain);
}

static void seal_pages(kvant_tensor *tensor, const int32_t *pages, size_t n, uint32_t n_threads)
{
    if (tensor->device)
        encode_on_device(tensor, pages, n, n_threads);
    else
        encode_pages(tensor, pages, n, NULL, n_threads);
    for (size_t i = 0; i < n; i++) {
        kvant_open_page *open = &tensor->open_pages[pages[i]];
        kvant_block *block = &tensor->blocks[open->block];
        block->open_page = KVANT_NO_PAGE;
        block->state = KVANT_BLOCK_SEALED;
        block->touched = true;
        open->block = -1;
    }
}

/* Rows written to the sequence after the page's last one; the newest row has age 0. */
static bool outside_window(const kvant_tensor *tensor, const kvant_open_page *open)
{
    uint64_t age = tensor->clocks[tensor->blocks[open->block].sequence] - open->stamp;
    return age >= kvant_tensor_codec_info(tensor)->recent_tokens;
}

/* A block that was opened again is complete when all of its slots were rewritten: sealing it after
 * every rewrite would quantise the other slots of its groups again each time. */
static bool due(const kvant_tensor *tensor, const kvant_open_page *open)
{
    return open->fresh == ALL_SLOTS && outside_window(tensor, open);
}

void kvant_open_seal_due(kvant_tensor *tensor, bool all, uint32_t n_threads)
{
    int32_t list[MOST_PAGES];
    size_t n = 0;
    for (uint32_t i = tensor->n_sink_pages; i < tensor->n_open_pages; i++) {
        const kvant_open_page *open = &tensor->open_pages[i];
        if (open->block < 0 || !(all || due(tensor, open)))
            continue;
        list[n++] = (int32_t)i;
        if (n == MOST_PAGES) {
            seal_pages(tensor, list, n, n_threads);
            n = 0;
        }
    }
    if (n)
        seal_pages(tensor, list, n, n_threads);
}

/* Taking pages */

/* The page that a block can have at once, or KVANT_NO_PAGE. Sinks beyond the places for sinks use
 * the pool: an engine may assign more first blocks to a sequence than there are. */
static int32_t free_page(const kvant_tensor *tensor, uint32_t block)
{
    for (uint32_t i = kvant_is_sink(tensor, block) ? 0 : tensor->n_sink_pages; i < tensor->n_open_pages; i++)
        if (tensor->open_pages[i].block < 0)
            return (int32_t)i;
    return KVANT_NO_PAGE;
}

bool kvant_open_has_room(const kvant_tensor *tensor, uint32_t block)
{
    uint32_t n = 0, sequence = tensor->blocks[block].sequence;
    int32_t page = free_page(tensor, block);
    if (page < (int32_t)tensor->n_sink_pages)
        return page >= 0;
    for (uint32_t i = tensor->n_sink_pages; i < tensor->n_open_pages; i++)
        n += tensor->open_pages[i].block >= 0 && tensor->blocks[tensor->open_pages[i].block].sequence == sequence;
    return n < tensor->window_blocks;
}

/* What to seal when the pool is full: of the blocks outside of their sequence's window, or of all
 * when there are none, the one that was not written for longest. Sinks that found no page of their
 * own are in the pool, too. */
static int32_t victim(const kvant_tensor *tensor)
{
    uint32_t best = tensor->n_sink_pages;
    for (uint32_t i = best + 1; i < tensor->n_open_pages; i++) {
        const kvant_open_page *a = &tensor->open_pages[i], *b = &tensor->open_pages[best];
        bool a_outside = outside_window(tensor, a), b_outside = outside_window(tensor, b);
        if (a_outside != b_outside ? a_outside : a->used < b->used)
            best = i;
    }
    return (int32_t)best;
}

int32_t kvant_open_take(kvant_tensor *tensor, uint32_t block, uint32_t n_threads)
{
    int32_t page = free_page(tensor, block);
    if (page < 0 && tensor->n_open_pages > tensor->n_sink_pages) {
        page = victim(tensor);
        if (tensor->open_pages[page].block >= 0)
            seal_pages(tensor, &page, 1, n_threads);
    }
    if (page < 0)
        return KVANT_NO_PAGE;
    tensor->open_pages[page] =
        (kvant_open_page){ block, 0, tensor->clocks[tensor->blocks[block].sequence], ++tensor->used };
    tensor->blocks[block].open_page = page;
    tensor->blocks[block].state = kvant_is_sink(tensor, block) ? KVANT_BLOCK_SINK : KVANT_BLOCK_OPEN;
    return page;
}

/* Opening and changing versions: units are kv heads. */

typedef struct change_job {
    kvant_tensor *tensor;
    const kvant_kernels *kernels;
    uint32_t block, from, to; /* versions */
    block_pages pages;
    bool sealed; /* where rows come from */
    bool store;  /* else only looked at */
    atomic_bool unfit;
} change_job;

/* Row y of one version in the terms of another; false when it leaves what pages can hold. */
static bool change_row(const change_job *job, uint32_t head, const kvant_affine *from, const kvant_affine *to, float *y)
{
    const kvant_codec *codec = job->tensor->codecs[head];
    float x[KVANT_MAX_HEAD_DIM];
    if (job->from == job->to)
        return true;
    kvant_transform_inverse(kvant_version_transform(job->tensor, job->from, head), job->kernels, from, y, x);
    kvant_transform_forward(kvant_version_transform(job->tensor, job->to, head), job->kernels, to, x, y);
    return kvant_codec_fits_open(codec, job->kernels, y);
}

/* Numbers near fp16's largest may have been rounded beyond it; what foreign bytes decode to becomes
 * a number, too. */
void kvant_limit_to_half(float *y, uint32_t n)
{
    for (uint32_t j = 0; j < n; j++)
        y[j] = fminf(fmaxf(y[j], -KVANT_HALF_MAX), KVANT_HALF_MAX);
}

static void read_row(const change_job *job, uint32_t head, uint32_t slot, const void *open, float *y)
{
    const kvant_codec *codec = job->tensor->codecs[head];
    if (!job->sealed) {
        kvant_codec_decode_open(codec, job->kernels, open, slot, 1, y);
        return;
    }
    kvant_codec_decode_transformed(codec, job->kernels, job->pages.sealed + job->tensor->page_offsets[head], slot, y);
    kvant_limit_to_half(y, job->tensor->head_dim);
}

static void change_unit(void *context, size_t unit, uint32_t worker)
{
    change_job *job = context;
    uint32_t head = (uint32_t)unit;
    const kvant_block *block = &job->tensor->blocks[job->block];
    void *open = job->pages.open + head * job->tensor->open_page_bytes;
    float rooms[2][KVANT_MAX_HEAD_DIM];
    const kvant_affine from = kvant_block_affine(job->tensor, job->block, job->from, head, rooms[0]),
                       to = kvant_block_affine(job->tensor, job->block, job->to, head, rooms[1]);
    (void)worker;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        if (!(block->written >> t & 1))
            continue;
        read_row(job, head, t, open, y);
        if (!change_row(job, head, &from, &to, y)) {
            atomic_store_explicit(&job->unfit, true, memory_order_relaxed);
            return;
        }
        if (job->store)
            kvant_codec_encode_open(job->tensor->codecs[head], job->kernels, y, t, 1, open);
    }
}

/* The rows of an open block, or of its sealed pages, in the terms of a version, into its open page.
 * False, and nothing stored, when one leaves fp16's range, or without memory; without `check_first`, rows before that
 * one are stored. */
static bool change(kvant_tensor *tensor, uint32_t block, uint32_t version, bool sealed, bool check_first,
                   uint32_t n_threads)
{
    change_job job = { .tensor = tensor,
                       .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                       .block = block,
                       .from = tensor->blocks[block].version,
                       .to = version,
                       .pages = borrow(tensor, block),
                       .sealed = sealed,
                       .store = !check_first };
    if (kvant_version_prepare(tensor, version) != KVANT_OK)
        return false;
    atomic_init(&job.unfit, false);
    kvant_parallel_for(tensor->n_kv_heads, n_threads, change_unit, &job);
    if (atomic_load(&job.unfit))
        return false;
    if (check_first) {
        job.store = true;
        kvant_parallel_for(tensor->n_kv_heads, n_threads, change_unit, &job);
    }
    give_back(tensor, block, &job.pages, false);
    return true;
}

/* The block's bytes that are sealed already are of another version now. */
static void move_version(kvant_tensor *tensor, uint32_t block, uint32_t version)
{
    if (tensor->blocks[block].version == version)
        return;
    tensor->open_pages[tensor->blocks[block].open_page].fresh = tensor->blocks[block].written;
    kvant_version_leave(tensor, block);
    kvant_version_join(tensor, block, version);
}

bool kvant_open_reexpress(kvant_tensor *tensor, uint32_t block, uint32_t version)
{
    if (!change(tensor, block, version, false, true, 1))
        return false;
    move_version(tensor, block, version);
    return true;
}

bool kvant_open_can_take(const kvant_tensor *tensor, uint32_t block)
{
    return tensor->blocks[block].open_page >= 0 || tensor->n_open_pages > tensor->n_sink_pages ||
           free_page(tensor, block) >= 0;
}

void kvant_open_abandon(kvant_tensor *tensor, uint32_t block)
{
    tensor->open_pages[tensor->blocks[block].open_page].block = -1;
    tensor->blocks[block].open_page = KVANT_NO_PAGE;
    tensor->blocks[block].state = KVANT_BLOCK_SEALED;
}

bool kvant_open_block(kvant_tensor *tensor, uint32_t block, uint32_t version, uint32_t n_threads)
{
    int32_t page = kvant_open_take(tensor, block, n_threads);
    if (page < 0)
        return false;
    kvant_pages_clear(tensor, kvant_open_page_of(tensor, page, 0), kvant_open_block_bytes(tensor));
    if (!tensor->blocks[block].written)
        return true;
    if (!change(tensor, block, version, true, false, n_threads)) {
        kvant_open_abandon(tensor, block);
        return false;
    }
    move_version(tensor, block, version);
    return true;
}

void kvant_open_touch(kvant_tensor *tensor, uint32_t block, uint64_t slots)
{
    kvant_open_page *open = &tensor->open_pages[tensor->blocks[block].open_page];
    open->fresh |= slots;
    open->stamp = tensor->clocks[tensor->blocks[block].sequence];
    open->used = tensor->used;
}
