/* tensor.c - kvant_tensor: sizes, creation, clearing, reading, inspection. */
#include "center.h"
#include "shift.h"
#include "transforms.h"
#include "key_transform.h"

#include <kvant/tensor_hooks.h>

#include <string.h>

#include "../base/abi.h"
#include "../base/alloc.h"
#include "../base/error.h"
#include "../base/parallel.h"

/* Spare blocks of the pool, in addition to the blocks that the windows of all sequences need.
 * Sequences that grow at the same time use them, and so do rewrites that open blocks again. */
#define SPARE_BLOCKS 2u

/* The first 64 rows of a sequence are pending in up to two blocks, because they begin anywhere in a
 * block. */
#define WAITING_BLOCKS 2u

typedef struct sizes {
    uint32_t sink_blocks, n_pool, n_sink_pages, n_step_pages, newest_rows, step_rows, step_blocks;
    bool always_open, learns;
    size_t block_bytes, block_stride, open_block_bytes, sealed_bytes, total;
} sizes;

static kvant_status invalid(const char *what)
{
    return kvant_fail(NULL, KVANT_ERR_ARGUMENT, "tensor: %s", what);
}

static kvant_status too_large(void)
{
    return kvant_fail(
        NULL, KVANT_ERR_MEMORY,
        "tensor: it would be larger than memory can be: choose fewer blocks or kv heads");
}

static kvant_status check_params(const kvant_tensor_params *p)
{
    if (!p->codecs || !p->n_kv_heads || !p->n_sequences || !p->n_blocks)
        return invalid("codecs, n_kv_heads, n_sequences and n_blocks must be set");
    kvant_step_pages steps;
    if (p->steps && !KVANT_ACCEPT_STRUCT(kvant_step_pages, &steps, p->steps, owner))
        return invalid("the size field of steps is not set to sizeof(kvant_step_pages)");
    if (p->n_blocks > INT32_MAX / 2)
        return invalid("n_blocks is larger than 2^30");
    if (p->blocks_per_sequence && (uint64_t)p->blocks_per_sequence * p->n_sequences < p->n_blocks)
        return invalid("blocks_per_sequence x n_sequences is less than n_blocks");
    for (uint32_t head = 0; head < p->n_kv_heads; head++) {
        if (!p->codecs[head])
            return invalid("codecs has a NULL for a kv head");
        if (!kvant_codecs_fit_together(&p->codecs[0]->info, &p->codecs[head]->info))
            return kvant_fail(
                NULL, KVANT_ERR_ARGUMENT,
                "the codecs of kv heads 0 and %u differ in role, head_dim, sink, recent, tokens "
                "per group, or in whether centre or scale come from the first rows (%s, %s)",
                (unsigned)head, p->codecs[0]->info.spec, p->codecs[head]->info.spec);
    }
    return KVANT_OK;
}

/* How many blocks the newest rows of a sequence and the row that is being written can lie in. */
static size_t window_blocks(uint32_t newest_rows)
{
    return ((size_t)newest_rows + KVANT_PAGE_TOKENS - 2) / KVANT_PAGE_TOKENS + 1;
}

/* Whether pages are as large as fp16 rows. Then an exact part would be a second copy. */
static bool stores_fp16(const kvant_tensor_params *p)
{
    for (uint32_t head = 0; head < p->n_kv_heads; head++) {
        const kvant_codec_info *info = &p->codecs[head]->info;
        if (info->page_bytes < KVANT_PAGE_TOKENS * info->head_dim * sizeof(uint16_t))
            return false;
    }
    return true;
}

static kvant_status accept_exact(const kvant_tensor_params *p, kvant_exact_part *exact)
{
    *exact = (kvant_exact_part){ 0 };
    if (!p->exact)
        return KVANT_OK;
    if (!KVANT_ACCEPT_STRUCT(kvant_exact_part, exact, p->exact, step))
        return invalid("the size field of exact is not set to sizeof(kvant_exact_part)");
    if (exact->first % KVANT_PAGE_TOKENS || (uint64_t)exact->first + exact->newest > exact->total ||
        (exact->total && !exact->step))
        return invalid("exact: first is not a multiple of 64, total is less than first + newest, "
                       "or step is 0");
    if (stores_fp16(p))
        *exact = (kvant_exact_part){ 0 };
    return KVANT_OK;
}

/* *pool = the open pages for codecs that keep the newest rows open: enough for the windows of all
 * sequences. */
static bool windows_pool(const kvant_tensor_params *p, const kvant_codec_info *info, size_t *pool)
{
    *pool = 0;
    if (info->block_tokens <= 1 && !info->recent_tokens)
        return true;
    if (!kvant_mul_size(p->n_sequences, window_blocks(info->recent_tokens), pool) ||
        *pool > INT32_MAX / 2 - SPARE_BLOCKS)
        return false;
    *pool += SPARE_BLOCKS;
    return true;
}

/* The pages of the exact part, without the pages that hold the rows of a step. A tensor that shares
 * the pages of a step has room for more sequences instead, at most for the rows that a step would
 * take. */
static size_t exact_pages(const kvant_tensor_params *p, const kvant_exact_part *exact)
{
    const uint64_t own = (uint64_t)exact->first + exact->newest,
                   all = p->n_sequences * (own + KVANT_PAGE_TOKENS) - KVANT_PAGE_TOKENS,
                   most = (uint64_t)exact->total + exact->step, some = all < most ? all : most;
    return p->steps && some > exact->total ? kvant_plan_blocks((size_t)some) + 1
                                           : kvant_plan_pages(exact->total, (size_t)own, 0);
}

/* Sizes one pool for the exact part of all sequences, with pages for the rows of a step, unless
 * these are shared. The windows and sinks that a codec asks for are added per sequence. */
static kvant_status size_exact_pool(const kvant_tensor_params *p, const kvant_exact_part *exact,
                                    sizes *s)
{
    const kvant_codec_info *info = &p->codecs[0]->info;
    size_t pool = exact_pages(p, exact), windows, sinks = 0;
    if (!windows_pool(p, info, &windows))
        return too_large();
    if (exact->first && info->sink_tokens > exact->first &&
        !kvant_mul_size(p->n_sequences, s->sink_blocks, &sinks))
        return too_large();
    if (sinks > INT32_MAX / 2 - windows)
        return too_large();
    pool = pool > windows + sinks ? pool : windows + sinks;
    pool += p->steps ? 0 : kvant_plan_blocks(exact->step);
    pool = p->n_open_blocks ? p->n_open_blocks : pool;
    s->n_pool = (uint32_t)(pool < p->n_blocks ? pool : p->n_blocks);
    pool = p->steps ? kvant_steps_blocks(p->steps, s->open_block_bytes) : 0;
    s->n_step_pages = (uint32_t)(pool < p->n_blocks - s->n_pool ? pool : p->n_blocks - s->n_pool);
    s->step_rows = s->n_step_pages ? s->n_step_pages * KVANT_PAGE_TOKENS : exact->step;
    s->step_blocks = (uint32_t)kvant_plan_blocks(s->step_rows);
    s->always_open = true;
    return KVANT_OK;
}

static kvant_status size_codecs_pool(const kvant_tensor_params *p, sizes *s)
{
    const kvant_codec_info *info = &p->codecs[0]->info;
    size_t sink_pages, pool;
    if (!kvant_mul_size(p->n_sequences, s->sink_blocks, &sink_pages) ||
        sink_pages > INT32_MAX / 2 || !windows_pool(p, info, &pool))
        return too_large();
    s->always_open = pool > 0;
    pool = s->always_open ? pool : s->learns ? WAITING_BLOCKS : 0;
    s->n_pool = pool && p->n_open_blocks ? p->n_open_blocks : (uint32_t)pool;
    s->n_sink_pages = (uint32_t)sink_pages;
    return s->n_pool > INT32_MAX / 2 ? too_large() : KVANT_OK;
}

static kvant_status size_pool(const kvant_tensor_params *p, sizes *s)
{
    const kvant_codec_info *info = &p->codecs[0]->info;
    const uint32_t per_sequence = p->blocks_per_sequence ? p->blocks_per_sequence : p->n_blocks;
    kvant_exact_part exact;
    s->learns = info->center == KVANT_CENTER_FIRST || info->norm == KVANT_NORM_FIRST;
    KVANT_FORWARD(accept_exact(p, &exact));
    const uint32_t first = exact.first > info->sink_tokens ? exact.first : info->sink_tokens;
    const size_t sinks = exact.step && !exact.first ? 0 : kvant_plan_blocks(first);
    s->sink_blocks = sinks < per_sequence ? (uint32_t)sinks : per_sequence;
    s->newest_rows = exact.newest > info->recent_tokens ? exact.newest : info->recent_tokens;
    s->step_blocks = 1;
    return exact.step ? size_exact_pool(p, &exact, s) : size_codecs_pool(p, s);
}

static bool sum_page_bytes(const kvant_tensor_params *p, size_t *sum)
{
    *sum = 0;
    for (uint32_t head = 0; head < p->n_kv_heads; head++) {
        if (p->codecs[head]->info.page_bytes > SIZE_MAX - *sum)
            return false;
        *sum += p->codecs[head]->info.page_bytes;
    }
    return true;
}

/* Computes the bytes from the first block's pages to the end of the last block's pages. */
static kvant_status span_blocks(const kvant_tensor_params *p, sizes *s)
{
    s->block_stride = p->block_stride ? p->block_stride : s->block_bytes;
    if (s->block_stride % KVANT_PAGE_ALIGN || s->block_stride < s->block_bytes)
        return invalid(
            "block_stride is smaller than the pages of a block, or not a multiple of 64");
    if (p->block_stride && s->n_pool + s->n_sink_pages)
        return invalid("block_stride must be 0 for codecs that keep fp16 rows (sink, recent)");
    if (!kvant_mul_size(p->n_blocks - 1, s->block_stride, &s->sealed_bytes) ||
        s->sealed_bytes > SIZE_MAX - s->block_bytes)
        return too_large();
    s->sealed_bytes += s->block_bytes;
    return KVANT_OK;
}

static kvant_status compute_sizes(const kvant_tensor_params *p, sizes *s)
{
    KVANT_FORWARD(check_params(p));
    size_t open_bytes, rows;
    *s = (sizes){ 0 };
    if (!sum_page_bytes(p, &s->block_bytes) ||
        !kvant_mul_size(p->n_kv_heads, p->codecs[0]->info.head_dim, &rows) ||
        !kvant_mul_size(rows, KVANT_PAGE_TOKENS * sizeof(uint16_t), &s->open_block_bytes))
        return too_large();
    KVANT_FORWARD(size_pool(p, s));
    KVANT_FORWARD(span_blocks(p, s));
    if (!kvant_mul_size((size_t)s->n_pool + s->n_sink_pages, s->open_block_bytes, &open_bytes) ||
        open_bytes > SIZE_MAX - s->sealed_bytes)
        return too_large();
    s->total = s->sealed_bytes + open_bytes;
    return KVANT_OK;
}

kvant_status kvant_tensor_size(const kvant_tensor_params *params, size_t *bytes)
{
    kvant_tensor_params p;
    sizes s;
    KVANT_RETURN_IF(!bytes, KVANT_ERR_ARGUMENT);
    if (!KVANT_ACCEPT_STRUCT(kvant_tensor_params, &p, params, n_open_blocks))
        return invalid(
            "params is NULL, or its size field is not set to sizeof(kvant_tensor_params)");
    KVANT_FORWARD(compute_sizes(&p, &s));
    *bytes = s.total;
    return KVANT_OK;
}

static kvant_status create_open_pages(kvant_tensor *tensor)
{
    const kvant_codec_info *info = kvant_tensor_codec_info(tensor);
    tensor->open_pages = kvant_alloc(tensor->n_open_pages, sizeof *tensor->open_pages);
    tensor->scratch = kvant_alloc((size_t)KVANT_SEAL_WORKERS * info->block_tokens * info->head_dim,
                                  sizeof(float));
    tensor->seen = kvant_alloc(tensor->n_open_pages + KVANT_MOST_RUNS, sizeof *tensor->seen);
    KVANT_RETURN_IF(!tensor->open_pages || !tensor->scratch || !tensor->seen, KVANT_ERR_MEMORY);
    for (uint32_t i = 0; i < tensor->n_open_pages; i++)
        tensor->open_pages[i].block = -1;
    return kvant_steps_create(tensor);
}

static void place_block(kvant_tensor *tensor, uint32_t block)
{
    uint32_t n = tensor->blocks_per_sequence;
    tensor->blocks[block] = (kvant_block){ .open_page = KVANT_NO_PAGE,
                                           .position = KVANT_NO_POSITION,
                                           .sequence = n ? block / n : 0,
                                           .index = n ? block % n : block };
}

static kvant_status allocate(kvant_tensor *tensor, const kvant_tensor_params *p)
{
    if (tensor->device) {
        tensor->staging = kvant_alloc(1, kvant_open_block_bytes(tensor) + tensor->block_bytes);
        KVANT_RETURN_IF(!tensor->staging, KVANT_ERR_MEMORY);
    }
    tensor->codecs = kvant_alloc(p->n_kv_heads, sizeof *tensor->codecs);
    tensor->page_offsets = kvant_alloc(p->n_kv_heads, sizeof *tensor->page_offsets);
    tensor->blocks = kvant_alloc(p->n_blocks, sizeof *tensor->blocks);
    tensor->clocks = kvant_alloc(p->n_sequences, sizeof *tensor->clocks);
    tensor->begun = kvant_alloc(p->n_sequences, sizeof *tensor->begun);
    tensor->sequence_transforms = kvant_alloc(p->n_sequences, 1);
    KVANT_RETURN_IF(!tensor->codecs || !tensor->page_offsets || !tensor->blocks ||
                        !tensor->clocks || !tensor->begun || !tensor->sequence_transforms,
                    KVANT_ERR_MEMORY);
    size_t offset = 0;
    for (uint32_t head = 0; head < p->n_kv_heads; head++) {
        tensor->codecs[head] = p->codecs[head];
        tensor->page_offsets[head] = offset;
        offset += p->codecs[head]->info.page_bytes;
    }
    for (uint32_t block = 0; block < p->n_blocks; block++)
        place_block(tensor, block);
    KVANT_FORWARD(kvant_transforms_create(tensor));
    return tensor->n_open_pages ? create_open_pages(tensor) : KVANT_OK;
}

static void describe(kvant_tensor *tensor, const kvant_tensor_params *p, const sizes *s,
                     void *memory)
{
    *tensor = (kvant_tensor){
        .n_kv_heads = p->n_kv_heads,
        .head_dim = p->codecs[0]->info.head_dim,
        .n_sequences = p->n_sequences,
        .n_blocks = p->n_blocks,
        .blocks_per_sequence = p->blocks_per_sequence,
        .block_bytes = s->block_bytes,
        .block_stride = s->block_stride,
        .open_page_bytes = s->open_block_bytes / p->n_kv_heads,
        .bytes = s->total,
        .sink_blocks = s->sink_blocks,
        .n_sink_pages = s->n_sink_pages,
        .n_own_pages = s->n_sink_pages + s->n_pool,
        .n_open_pages = s->n_sink_pages + s->n_pool + s->n_step_pages,
        .steps = s->n_step_pages ? p->steps : NULL,
        .newest_rows = s->newest_rows,
        .step_rows = s->step_rows,
        .step_blocks = s->step_blocks,
        .always_open = s->always_open,
        .learns = s->learns,
        .sealed = memory,
        .open = (uint8_t *)memory + s->sealed_bytes,
    };
}

kvant_status kvant_tensor_create(const kvant_tensor_params *params, void *memory,
                                 kvant_tensor **out)
{
    return kvant_tensor_create_on(NULL, NULL, params, memory, out);
}

kvant_status kvant_tensor_create_on(const kvant_page_device *device, void *context,
                                    const kvant_tensor_params *params, void *memory,
                                    kvant_tensor **out)
{
    kvant_tensor_params p;
    sizes s;
    KVANT_RETURN_IF(!out, KVANT_ERR_ARGUMENT);
    *out = NULL;
    if (!KVANT_ACCEPT_STRUCT(kvant_tensor_params, &p, params, n_open_blocks))
        return invalid(
            "params is NULL, or its size field is not set to sizeof(kvant_tensor_params)");
    KVANT_FORWARD(compute_sizes(&p, &s));
    if (!memory || (uintptr_t)memory % KVANT_PAGE_ALIGN)
        return invalid("memory is NULL, or not aligned to KVANT_PAGE_ALIGN");
    if (s.n_step_pages &&
        (device || !p.steps->memory || (uintptr_t)p.steps->memory % KVANT_PAGE_ALIGN))
        return invalid("steps: memory is NULL, on a GPU, or not aligned to KVANT_PAGE_ALIGN");
    kvant_tensor *tensor = kvant_alloc(1, sizeof *tensor);
    KVANT_RETURN_IF(!tensor, kvant_fail(NULL, KVANT_ERR_MEMORY, "out of memory for a tensor"));
    describe(tensor, &p, &s, memory);
    tensor->device = device;
    tensor->device_context = context;
    kvant_status status = allocate(tensor, &p);
    if (status != KVANT_OK)
        kvant_tensor_free(&tensor);
    *out = tensor;
    if (status == KVANT_ERR_UNSUPPORTED)
        return kvant_fail(NULL, status,
                          "a codec takes its centre or scale from a calibration and was created "
                          "without one: use kvant_codec_create_calibrated");
    return status == KVANT_OK ? status : kvant_fail(NULL, status, "out of memory for a tensor");
}

void kvant_tensor_free(kvant_tensor **tensor)
{
    if (!tensor || !*tensor)
        return;
    kvant_steps_release(*tensor);
    kvant_transforms_destroy(*tensor);
    kvant_shifts_free(*tensor);
    kvant_free((*tensor)->codecs);
    kvant_free((*tensor)->page_offsets);
    kvant_free((*tensor)->blocks);
    kvant_free((*tensor)->open_pages);
    kvant_free((*tensor)->seen);
    kvant_plan_free(&(*tensor)->plan);
    kvant_free((*tensor)->clocks);
    kvant_free((*tensor)->begun);
    kvant_free((*tensor)->sequence_transforms);
    kvant_free((*tensor)->scratch);
    kvant_free((*tensor)->staging);
    kvant_free(*tensor);
    *tensor = NULL;
}

kvant_status kvant_tensor_assign(kvant_tensor *tensor, uint32_t block, uint32_t sequence,
                                 uint32_t index)
{
    KVANT_RETURN_IF(!tensor || tensor->blocks_per_sequence || block >= tensor->n_blocks ||
                        sequence >= tensor->n_sequences || tensor->blocks[block].written,
                    KVANT_ERR_ARGUMENT);
    tensor->blocks[block].sequence = sequence;
    tensor->blocks[block].index = index;
    return KVANT_OK;
}

void kvant_block_clear(kvant_tensor *tensor, uint32_t block)
{
    kvant_block *b = &tensor->blocks[block];
    kvant_open_leave(tensor, block, true);
    if (b->resident)
        kvant_pages_clear(tensor, kvant_sealed_page(tensor, block, 0), tensor->block_bytes);
    if (b->written)
        kvant_transforms_leave(tensor, block);
    kvant_shifts_clear_block(tensor, block);
    *b = (kvant_block){ .open_page = KVANT_NO_PAGE,
                        .position = KVANT_NO_POSITION,
                        .sequence = b->sequence,
                        .index = b->index };
}

kvant_status kvant_tensor_clear_blocks(kvant_tensor *tensor, uint32_t first, uint32_t n)
{
    KVANT_RETURN_IF(!tensor || first > tensor->n_blocks || n > tensor->n_blocks - first,
                    KVANT_ERR_ARGUMENT);
    for (uint32_t block = first; block < first + n; block++)
        kvant_block_clear(tensor, block);
    return KVANT_OK;
}

void kvant_tensor_clear(kvant_tensor *tensor)
{
    if (!tensor)
        return;
    kvant_tensor_clear_blocks(tensor, 0, tensor->n_blocks);
    memset(tensor->clocks, 0, tensor->n_sequences * sizeof *tensor->clocks);
    memset(tensor->begun, 0, tensor->n_sequences * sizeof *tensor->begun);
    kvant_transforms_reset(tensor);
    kvant_shifts_free(tensor);
    tensor->any_written = false;
}

/* Reads the transformed row of a slot. A codec of whole groups fills gaps with numbers of other
 * slots, so a slot that was never written is set to zeros here. */
static void decode_slot(const kvant_tensor *tensor, const kvant_kernels *kernels, uint32_t block,
                        uint32_t token, const kvant_page_ref *ref, float *y)
{
    if (!(tensor->blocks[block].written >> token & 1))
        memset(y, 0, tensor->head_dim * sizeof *y);
    else if (ref->open)
        kvant_codec_decode_open(ref->codec, kernels, ref->page, token, 1, y);
    else
        kvant_codec_decode_transformed(ref->codec, kernels, ref->page, token, y);
}

/* Reads n slots of one block, for one kv head. */
static void read_head(const kvant_tensor *tensor, const kvant_kernels *kernels, size_t first,
                      size_t n, uint32_t head, float *rows, size_t stride)
{
    const uint32_t block = (uint32_t)(first / KVANT_PAGE_TOKENS),
                   transform_id = tensor->blocks[block].transform_id;
    float room[KVANT_MAX_HEAD_DIM], y[KVANT_MAX_HEAD_DIM];
    const kvant_page_ref ref = kvant_tensor_page(tensor, block, head);
    const kvant_affine affine = kvant_block_affine(tensor, block, transform_id, head, room);
    rows += (size_t)head * tensor->head_dim;
    for (size_t i = 0; i < n; i++) {
        const uint32_t slot = (uint32_t)((first + i) % KVANT_PAGE_TOKENS);
        decode_slot(tensor, kernels, block, slot, &ref, y);
        kvant_transform_inverse(kvant_tensor_head_transform(tensor, transform_id, head), kernels,
                                &affine, y, rows + i * stride);
        if (tensor->shifts && tensor->blocks[block].written >> slot & 1)
            kvant_shift_rotate(tensor->shifts, kvant_slot_shift(tensor, block, slot), false,
                               rows + i * stride);
    }
}

kvant_status kvant_tensor_read(const kvant_tensor *tensor, size_t first, size_t n, float *rows,
                               size_t stride)
{
    KVANT_RETURN_IF(!tensor || !rows, KVANT_ERR_ARGUMENT);
    size_t total = (size_t)tensor->n_blocks * KVANT_PAGE_TOKENS;
    KVANT_RETURN_IF(first > total || n > total - first ||
                        (n > 1 && stride < kvant_tensor_width(tensor)),
                    KVANT_ERR_ARGUMENT);
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (size_t done = 0, here; done < n; done += here) {
        const size_t left = KVANT_PAGE_TOKENS - (first + done) % KVANT_PAGE_TOKENS;
        here = n - done < left ? n - done : left;
        for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
            read_head(tensor, kernels, first + done, here, head, rows + done * stride, stride);
    }
    return KVANT_OK;
}

/* With fewer rows, waking a thread costs more than decoding. */
#define ROWS_FOR_THREADS 16u

typedef struct read_job {
    const kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const int64_t *slots;
    size_t n, stride;
    float *rows;
} read_job;

/* How many slots from the i-th on follow each other in one block. */
static size_t slots_in_order(const read_job *job, size_t i, size_t end)
{
    size_t n = 1;
    while (job->slots[i] >= 0 && i + n < end && job->slots[i + n] == job->slots[i] + (int64_t)n &&
           job->slots[i + n] % KVANT_PAGE_TOKENS != 0)
        n++;
    return n;
}

/* Reads one kv head of up to 64 rows. */
static void read_block_head(void *context, size_t unit, uint32_t worker)
{
    const read_job *job = context;
    const uint32_t head = (uint32_t)(unit % job->tensor->n_kv_heads), d = job->tensor->head_dim;
    const size_t first = unit / job->tensor->n_kv_heads * KVANT_PAGE_TOKENS, left = job->n - first;
    const size_t end = first + (left < KVANT_PAGE_TOKENS ? left : KVANT_PAGE_TOKENS);
    (void)worker;
    for (size_t i = first, n; i < end; i += n) {
        float *row = job->rows + i * job->stride;
        n = slots_in_order(job, i, end);
        if (job->slots[i] < 0)
            memset(row + (size_t)head * d, 0, d * sizeof *row);
        else
            read_head(job->tensor, job->kernels, (size_t)job->slots[i], n, head, row, job->stride);
    }
}

kvant_status kvant_tensor_read_slots(const kvant_tensor *tensor, const int64_t *slots, size_t n,
                                     float *rows, size_t stride, uint32_t n_threads)
{
    read_job job = { tensor, kvant_kernels_get(KVANT_CPU_AUTO), slots, n, stride, rows };
    KVANT_RETURN_IF(!tensor || !slots || !rows || !n_threads ||
                        (n > 1 && stride < kvant_tensor_width(tensor)),
                    KVANT_ERR_ARGUMENT);
    for (size_t i = 0; i < n; i++)
        KVANT_RETURN_IF(slots[i] >= 0 && (uint64_t)slots[i] / KVANT_PAGE_TOKENS >= tensor->n_blocks,
                        KVANT_ERR_ARGUMENT);
    const size_t pages = (n + KVANT_PAGE_TOKENS - 1) / KVANT_PAGE_TOKENS;
    kvant_parallel_for(pages * tensor->n_kv_heads, n >= ROWS_FOR_THREADS ? n_threads : 1,
                       read_block_head, &job);
    return KVANT_OK;
}

kvant_status kvant_tensor_get_block(const kvant_tensor *tensor, uint32_t block, uint32_t kv_head,
                                    kvant_block_info *info)
{
    KVANT_RETURN_IF(!tensor || block >= tensor->n_blocks || kv_head >= tensor->n_kv_heads,
                    KVANT_ERR_ARGUMENT);
    const kvant_block *b = &tensor->blocks[block];
    const kvant_page_ref page = kvant_tensor_page(tensor, block, kv_head);
    const kvant_centers *centers = kvant_tensor_transform_centers(tensor, b->transform_id);
    kvant_block_info full = {
        .state = (kvant_block_state)b->state,
        .transform_id = b->transform_id,
        .written = b->written,
        .codec = page.codec,
        .page = page.page,
        .affine = kvant_tensor_transform_affine(tensor, b->transform_id, kv_head),
        .start = centers ? centers->start + (size_t)kv_head * tensor->head_dim : NULL
    };
    return KVANT_RETURN_STRUCT(kvant_block_info, info, &full, affine) ? KVANT_OK
                                                                      : KVANT_ERR_ARGUMENT;
}

static size_t learned_bytes(const kvant_tensor *tensor)
{
    return kvant_key_transform_bytes(tensor) + kvant_shifts_bytes(tensor);
}

size_t kvant_tensor_learning_bytes(const kvant_tensor *tensor)
{
    return tensor ? learned_bytes(tensor) + kvant_transforms_bytes(tensor) : 0;
}

kvant_status kvant_tensor_get_info(const kvant_tensor *tensor, kvant_tensor_info *info)
{
    KVANT_RETURN_IF(!tensor, KVANT_ERR_ARGUMENT);
    kvant_tensor_info full = { .role = kvant_tensor_codec_info(tensor)->role,
                               .n_kv_heads = tensor->n_kv_heads,
                               .head_dim = tensor->head_dim,
                               .n_blocks = tensor->n_blocks,
                               .n_open_blocks = tensor->n_open_pages - tensor->n_sink_pages,
                               .bytes = tensor->bytes,
                               .sealed_bytes = tensor->block_bytes,
                               .open_bytes = tensor->open_page_bytes * tensor->n_kv_heads,
                               .learned_bytes = learned_bytes(tensor),
                               .learned_most = kvant_key_transform_most(tensor),
                               .working_bytes = kvant_transforms_bytes(tensor),
                               .working_most = kvant_transforms_most(tensor) };
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++)
        full.n_transforms += tensor->transforms[v].alive;
    for (uint32_t block = 0; block < tensor->n_blocks; block++)
        full.written_blocks += tensor->blocks[block].written != 0;
    return KVANT_RETURN_STRUCT(kvant_tensor_info, info, &full, written_blocks) ? KVANT_OK
                                                                               : KVANT_ERR_ARGUMENT;
}
