/* fp16_pages.c - what open (fp16) pages hold: encodes their rows, decodes rows into them, and
 * expresses rows in another transform. Which blocks have an open page is steps.c's part.
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
#include "key_transform.h"

#define ALL_SLOTS UINT64_MAX

/* A block's pages where the CPU can work on them: in the tensor's memory, or copies of a device's
 * pages. */
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

/* Writes the open or the sealed pages back to the device, whichever changed. */
static void write_back(const kvant_tensor *tensor, uint32_t block, const block_pages *borrowed,
                       bool sealed)
{
    const block_pages at = pages_in_place(tensor, block);
    if (!tensor->device)
        return;
    if (sealed)
        kvant_pages_copy(tensor, at.sealed, borrowed->sealed, tensor->block_bytes);
    else
        kvant_pages_copy(tensor, at.open, borrowed->open, kvant_open_block_bytes(tensor));
}

/* Sealing. Pages are independent, so a work item is an open page and a kv head. */

#define MOST_PAGES 64u       /* pages sealed together */
#define ROWS_FOR_THREADS 16u /* with fewer rows, waking a thread costs more than encoding */

typedef struct sealing {
    int32_t page;
    bool closes;    /* the block gives its open page back */
    uint64_t slots; /* to be encoded */
} sealing;

typedef struct seal_job {
    kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const block_pages *borrowed; /* copies of a device's only page, or NULL */
    size_t n;
    sealing list[MOST_PAGES];
} seal_job;

/* Reads rows of block_tokens slots from an open page. A slot that was never written gets a copy of
 * a written row, so that it widens no range. */
static void gather(const seal_job *job, const kvant_codec *codec, const void *page,
                   uint64_t written, uint32_t first, float *rows)
{
    uint32_t d = codec->info.head_dim, n = codec->info.block_tokens, filler = first;
    while (!(written >> filler & 1))
        filler++;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t slot = written >> (first + i) & 1 ? first + i : filler;
        kvant_codec_decode_open(codec, job->kernels, page, slot, 1, rows + (size_t)i * d);
    }
}

/* Encodes some slots of an open page. */
static void seal_page(const seal_job *job, const sealing *s, uint32_t head, float *scratch)
{
    kvant_tensor *tensor = job->tensor;
    uint32_t block = (uint32_t)tensor->open_pages[s->page].block;
    uint32_t n = kvant_tensor_codec_info(tensor)->block_tokens;
    const block_pages at = job->borrowed ? *job->borrowed : pages_in_place(tensor, block);
    uint64_t mask = ALL_SLOTS >> (KVANT_PAGE_TOKENS - n);
    kvant_codec_fetch(tensor->codecs[head], at.sealed + tensor->page_offsets[head]);
    for (uint32_t first = 0; first < KVANT_PAGE_TOKENS; first += n) {
        if (!(s->slots >> first & mask))
            continue;
        gather(job, tensor->codecs[head], at.open + head * tensor->open_page_bytes,
               tensor->blocks[block].written, first, scratch);
        kvant_codec_encode_transformed(tensor->codecs[head], job->kernels, scratch, first, n,
                                       at.sealed + tensor->page_offsets[head]);
    }
}

static size_t heads_of(const seal_job *job)
{
    return job->n * job->tensor->n_kv_heads;
}

/* Seals a work item of one job, or of two: the keys and the values of a layer. */
static void seal_head(void *jobs, size_t unit, uint32_t worker)
{
    const seal_job *job = jobs;
    for (; unit >= heads_of(job); job++)
        unit -= heads_of(job);
    const kvant_tensor *tensor = job->tensor;
    size_t floats = (size_t)kvant_tensor_codec_info(tensor)->block_tokens * tensor->head_dim;
    seal_page(job, &job->list[unit / tensor->n_kv_heads], (uint32_t)(unit % tensor->n_kv_heads),
              tensor->scratch + worker * floats);
}

static void encode_pages(seal_job *jobs, size_t n_jobs, uint32_t n_threads)
{
    size_t n = 0;
    for (size_t i = 0; i < n_jobs; i++)
        n += heads_of(&jobs[i]);
    n_threads = n_threads < KVANT_SEAL_WORKERS ? n_threads : KVANT_SEAL_WORKERS;
    kvant_parallel_for(n, n_threads, seal_head, jobs);
}

/* Devices seal the first slots of a page. The CPU seals a block that was opened again or was
 * imported with gaps. */
static void encode_on_device(const seal_job *job, uint32_t n_threads)
{
    kvant_tensor *tensor = job->tensor;
    int32_t plain[MOST_PAGES];
    size_t n_plain = 0;
    for (size_t i = 0; i < job->n; i++) {
        const kvant_open_page *open = &tensor->open_pages[job->list[i].page];
        const uint64_t written = tensor->blocks[open->block].written;
        if (open->dirty == written && !(written & (written + 1))) {
            plain[n_plain++] = job->list[i].page;
            continue;
        }
        const block_pages borrowed = borrow(tensor, (uint32_t)open->block);
        seal_job one = { tensor, job->kernels, &borrowed, 1, { job->list[i] } };
        encode_pages(&one, 1, n_threads);
        write_back(tensor, (uint32_t)open->block, &borrowed, true);
    }
    if (n_plain)
        tensor->device->seal(tensor, plain, n_plain);
}

static void record_sealed(seal_job *job)
{
    for (size_t i = 0; i < job->n; i++) {
        kvant_open_page *open = &job->tensor->open_pages[job->list[i].page];
        kvant_block *block = &job->tensor->blocks[open->block];
        open->dirty &= ~job->list[i].slots;
        block->resident = true;
        if (job->list[i].closes)
            kvant_open_leave(job->tensor, (uint32_t)open->block, false);
    }
    job->n = 0;
}

static void seal(seal_job *jobs, size_t n_jobs, uint32_t n_threads)
{
    if (!jobs->tensor->device)
        encode_pages(jobs, n_jobs, n_threads);
    for (size_t i = 0; i < n_jobs; i++) {
        if (jobs[i].tensor->device)
            encode_on_device(&jobs[i], n_threads);
        record_sealed(&jobs[i]);
    }
}

/* Leaves the list as it is, because a step of one token fills at most one entry. */
static void begin(seal_job *job, kvant_tensor *tensor)
{
    job->tensor = tensor;
    job->kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    job->borrowed = NULL;
    job->n = 0;
}

void kvant_open_encode_due(kvant_tensor *tensor, uint32_t kv_head)
{
    const sealing s = { tensor->due_page, false, tensor->due_slots };
    float row[KVANT_MAX_HEAD_DIM];
    seal_job job;
    begin(&job, tensor);
    seal_page(&job, &s, kv_head, row);
}

void kvant_open_finish_due(kvant_tensor *tensor)
{
    for (uint32_t head = 0; tensor->due_slots && head < tensor->n_kv_heads; head++)
        kvant_open_encode_due(tensor, head);
    tensor->due_slots = 0;
}

void kvant_open_seal(kvant_tensor *tensor, const kvant_plan_change *list, uint32_t n,
                     uint32_t n_threads)
{
    seal_job job;
    begin(&job, tensor);
    if (n)
        kvant_open_finish_due(tensor);
    for (uint32_t i = 0; i < n; i++) {
        const int32_t page = tensor->blocks[list[i].block].open_page;
        job.list[job.n++] = (sealing){ page, true, tensor->open_pages[page].dirty };
        if (job.n == MOST_PAGES || i + 1 == n)
            seal(&job, 1, n_threads);
    }
}

/* The slots whose rows have left the window. The rows of a page are assumed to have come in the
 * order of their slots. If all of them are outside, the whole page is. */
static uint64_t slots_outside(const kvant_tensor *tensor, const kvant_open_page *open)
{
    int64_t age = kvant_plan_age(tensor->plan, (uint32_t)open->block);
    uint64_t slots = 0;
    for (uint32_t slot = KVANT_PAGE_TOKENS; slot-- > 0;) {
        const uint64_t bit = (uint64_t)1 << slot;
        slots |= age >= (int64_t)tensor->newest_rows ? bit : 0;
        age += (open->dirty & bit) != 0;
    }
    return slots;
}

/* Lists the rows to seal in an open page. A step of a single token seals one row, so that no
 * step takes long. Rows whose codes share scales are sealed with their block. A block that was
 * opened again is complete when all of its slots were rewritten. Sealing it after every rewrite
 * would quantise the remaining slots of its groups again each time. */
static sealing due(const kvant_tensor *tensor, uint32_t page)
{
    const kvant_open_page *open = &tensor->open_pages[page];
    const bool outside = kvant_plan_is_old(tensor->plan, (uint32_t)open->block);
    const bool complete = outside && open->dirty == ALL_SLOTS;
    if (!tensor->step_rows || tensor->device || kvant_tensor_codec_info(tensor)->block_tokens > 1)
        return (sealing){ (int32_t)page, true, complete ? ALL_SLOTS : 0 };
    return (sealing){ (int32_t)page, outside && tensor->blocks[open->block].written == ALL_SLOTS,
                      slots_outside(tensor, open) };
}

/* Lists pages with rows to seal, beginning with `page`. Returns the page at which the list was
 * full. */
static uint32_t list_due(seal_job *job, uint32_t page, bool all)
{
    const kvant_tensor *tensor = job->tensor;
    for (; page < tensor->n_open_pages && job->n < MOST_PAGES; page++) {
        const kvant_open_page *open = &tensor->open_pages[page];
        if (open->block < 0 || kvant_is_sink(tensor, (uint32_t)open->block))
            continue;
        sealing s = all ? (sealing){ (int32_t)page, true, ALL_SLOTS } : due(tensor, page);
        const bool listed = (s.closes && s.slots) || (open->dirty & s.slots);
        s.slots &= open->dirty;
        if (listed)
            job->list[job->n++] = s;
    }
    return page;
}

static bool worth_threads(const seal_job *jobs, size_t n_jobs)
{
    uint32_t n = 0;
    for (const seal_job *job = jobs; job < jobs + n_jobs; job++)
        for (size_t i = 0; i < job->n; i++)
            n += kvant_count_slots(job->list[i].slots);
    return n >= ROWS_FOR_THREADS || kvant_parallel_is_lent();
}

bool kvant_open_take_due(kvant_tensor *tensor, uint32_t block)
{
    seal_job job;
    begin(&job, tensor);
    list_due(&job, 0, false);
    const sealing *s = &job.list[0];
    if (job.n && (job.n > 1 || s->closes || tensor->open_pages[s->page].block == block))
        return false;
    if (job.n) {
        tensor->due_page = s->page;
        tensor->due_slots = s->slots;
    }
    record_sealed(&job);
    return true;
}

void kvant_open_seal_due(kvant_tensor *const *tensors, size_t n_tensors, bool all,
                         uint32_t n_threads)
{
    seal_job jobs[2];
    uint32_t page[2] = { 0, 0 };
    bool left = true;
    for (size_t i = 0; i < n_tensors; i++)
        begin(&jobs[i], tensors[i]);
    while (left) {
        left = false;
        for (size_t i = 0; i < n_tensors; i++) {
            page[i] = list_due(&jobs[i], page[i], all);
            left |= page[i] < tensors[i]->n_open_pages;
        }
        seal(jobs, n_tensors, worth_threads(jobs, n_tensors) ? n_threads : 1);
    }
}

/* Opening, and changing transforms. A work item is a kv head. */

typedef struct change_job {
    kvant_tensor *tensor;
    const kvant_kernels *kernels;
    uint32_t block, from, to; /* from, to: transforms */
    block_pages pages;
    bool sealed; /* rows come from the sealed pages */
    bool store;  /* false: rows are only checked */
    atomic_bool rejected;
} change_job;

/* Expresses row y of one transform in another. Returns false when it leaves the range of open
 * pages. */
static bool change_row(const change_job *job, uint32_t head, const kvant_affine *from,
                       const kvant_affine *to, float *y)
{
    const kvant_codec *codec = job->tensor->codecs[head];
    float x[KVANT_MAX_HEAD_DIM];
    if (job->from == job->to)
        return true;
    kvant_transform_inverse(kvant_tensor_head_transform(job->tensor, job->from, head), job->kernels,
                            from, y, x);
    kvant_transform_forward(kvant_tensor_head_transform(job->tensor, job->to, head), job->kernels,
                            to, x, y);
    return kvant_codec_fits_open(codec, job->kernels, y);
}

/* Numbers near fp16's largest number may have been rounded beyond it. Foreign bytes may decode to
 * NaNs or infinities; these become numbers, too. */
void kvant_limit_to_half(float *y, uint32_t n)
{
    for (uint32_t j = 0; j < n; j++)
        y[j] = fminf(fmaxf(y[j], -KVANT_HALF_MAX), KVANT_HALF_MAX);
}

static void read_row(const change_job *job, uint32_t head, uint32_t slot, const void *open,
                     float *y)
{
    const kvant_codec *codec = job->tensor->codecs[head];
    if (!job->sealed) {
        kvant_codec_decode_open(codec, job->kernels, open, slot, 1, y);
        return;
    }
    kvant_codec_decode_transformed(codec, job->kernels,
                                   job->pages.sealed + job->tensor->page_offsets[head], slot, y);
    kvant_limit_to_half(y, job->tensor->head_dim);
}

static void change_head(void *context, size_t unit, uint32_t worker)
{
    change_job *job = context;
    uint32_t head = (uint32_t)unit;
    const kvant_block *block = &job->tensor->blocks[job->block];
    void *open = job->pages.open + head * job->tensor->open_page_bytes;
    float rooms[2][KVANT_MAX_HEAD_DIM];
    const kvant_affine from =
                           kvant_block_affine(job->tensor, job->block, job->from, head, rooms[0]),
                       to = kvant_block_affine(job->tensor, job->block, job->to, head, rooms[1]);
    (void)worker;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        if (!(block->written >> t & 1))
            continue;
        read_row(job, head, t, open, y);
        if (!change_row(job, head, &from, &to, y)) {
            atomic_store_explicit(&job->rejected, true, memory_order_relaxed);
            return;
        }
        if (job->store)
            kvant_codec_encode_open(job->tensor->codecs[head], job->kernels, y, t, 1, open);
    }
}

/* Expresses the rows of an open block, or of its sealed pages, in a transform and stores them in
 * its open page. Returns false and stores nothing when a row leaves fp16's range or memory is
 * short. Without `check_first` the rows before that row are stored nevertheless. */
static bool change(kvant_tensor *tensor, uint32_t block, uint32_t transform_id, bool sealed,
                   bool check_first, uint32_t n_threads)
{
    change_job job = { .tensor = tensor,
                       .kernels = kvant_kernels_get(KVANT_CPU_AUTO),
                       .block = block,
                       .from = tensor->blocks[block].transform_id,
                       .to = transform_id,
                       .pages = borrow(tensor, block),
                       .sealed = sealed,
                       .store = !check_first };
    if (kvant_transforms_prepare(tensor, transform_id) != KVANT_OK)
        return false;
    atomic_init(&job.rejected, false);
    kvant_parallel_for(tensor->n_kv_heads, n_threads, change_head, &job);
    if (atomic_load(&job.rejected))
        return false;
    if (check_first) {
        job.store = true;
        kvant_parallel_for(tensor->n_kv_heads, n_threads, change_head, &job);
    }
    write_back(tensor, block, &job.pages, false);
    return true;
}

/* Records that an open block's rows are in another transform now. All of its sealed bytes are then
 * out of date. */
static void change_transform(kvant_tensor *tensor, uint32_t block, uint32_t transform_id)
{
    if (tensor->blocks[block].transform_id == transform_id)
        return;
    tensor->open_pages[tensor->blocks[block].open_page].dirty = tensor->blocks[block].written;
    kvant_transforms_leave(tensor, block);
    kvant_transforms_join(tensor, block, transform_id);
}

bool kvant_open_reexpress(kvant_tensor *tensor, uint32_t block, uint32_t transform_id)
{
    if (!change(tensor, block, transform_id, false, true, 1))
        return false;
    change_transform(tensor, block, transform_id);
    return true;
}

bool kvant_open_fill(kvant_tensor *tensor, uint32_t block, uint32_t transform_id,
                     uint32_t n_threads)
{
    const void *exact = kvant_exact_page(tensor, block);
    const int32_t page = kvant_open_enter(tensor, block, n_threads);
    if (page < 0)
        return false;
    kvant_pages_clear(tensor, kvant_open_page_of(tensor, page, 0), kvant_open_block_bytes(tensor));
    if (!tensor->blocks[block].written)
        return true;
    if (exact) /* on a GPU: exact rows stay exact */
        kvant_pages_copy(tensor, kvant_open_page_of(tensor, page, 0), exact,
                         kvant_open_block_bytes(tensor));
    if (!change(tensor, block, transform_id, !exact, false, n_threads)) {
        kvant_open_leave(tensor, block, false);
        return false;
    }
    change_transform(tensor, block, transform_id);
    return true;
}

bool kvant_open_block(kvant_tensor *tensor, uint32_t block, uint32_t transform_id,
                      uint32_t n_threads)
{
    return kvant_open_acquire(tensor, block, 0, n_threads) >= 0 &&
           kvant_open_fill(tensor, block, transform_id, n_threads);
}
