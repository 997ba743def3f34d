/* device_cuda.c - a cache in the memory of a GPU: writes rows to pages.
 *
 * As on the CPU, the tensors decide on the host which block a row goes to, when open blocks are
 * sealed, and which transform rows get. This file does the work on pages, ordered on the cache's
 * stream. Rows of ordinary size never leave the GPU. The host reads rows with large numbers,
 * because they may not fit their codec. With params.asynchronous it does not wait for that: kernels
 * leave such rows out, and the next call reports them.
 *
 * For centre and scale the host reads sums over rows, once in 64 rows. For transform=first it reads
 * long batches and their queries, until it has learned enough for a matrix. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "cuda_layers.h"

/* Work on pages */

/* Passes rows through a dense rotation, so that append gets transformed rows. */
static void rotate_rows(const cuda_append *a, kvant_cuda_rows *rows)
{
    cuda_memory *memory = a->part->memory;
    const size_t width = kvant_tensor_width(a->part->tensor), d = a->part->tensor->head_dim,
                 floats = KVANT_CACHE_BATCH * width;
    const kvant_status room =
        kvant_cuda_grow(&memory->rotated, 2 * floats * sizeof(float), "allocating rows");
    kvant_cuda_rotate_rows_args args = kvant_cuda_rotation_of(a->part, false);
    args.rows = rows->rows, args.token_stride = rows->token_stride,
    args.head_stride = rows->head_stride;
    args.n_tokens = (uint32_t)a->n, args.n_heads = args.n_kv_heads;
    args.center = rows->center, args.divisor = rows->scale, args.before = rows->key_transform;
    args.out = (float *)memory->rotated.at + (size_t)a->part->role * floats;
    args.out_token_stride = width, args.out_head_stride = d;
    kvant_cuda_record_error(
        memory, room == KVANT_OK ? kvant_cuda_rotate_rows(&args, memory->stream) : room, "append");
    rows->rows = args.out;
    rows->token_stride = width;
    rows->center = rows->scale = rows->key_transform = NULL;
}

void kvant_cuda_add_rows(const cuda_append *a, kvant_cuda_kernel_append_args *args)
{
    const kvant_tensor *tensor = a->part->tensor;
    const cuda_transform transform = kvant_cuda_transform(a->part, a->transform_id);
    kvant_cuda_rows rows = { .codec = a->open ? transform.open_codec : transform.codec,
                             .pages = a->exact ? kvant_cuda_exact_pages(a->part)
                                               : kvant_cuda_pages_of(a->part, a->open),
                             .rows = a->rows,
                             .token_stride = a->stride,
                             .head_stride = tensor->head_dim,
                             .center = transform.center,
                             .scale = transform.scale,
                             .key_transform = transform.key_transform };
    if (transform.rotates)
        rotate_rows(a, &rows);
    *(a->part->role == KVANT_ROLE_K ? &args->k : &args->v) = rows;
    if (transform.compact) /* of keys; values have no matrix on a device */
        args->k_compact = transform.compact, args->k_matrix = a->part->memory->matrix.at;
}

static int64_t *copy_slots(cuda_memory *memory, const cuda_append *a)
{
    int64_t *to = memory->arguments->slots[a->part->role],
            *copied = memory->copied[a->part->role].slots;
    size_t *n = &memory->copied[a->part->role].n;
    const size_t bytes = a->n * sizeof *to;
    if (*n < a->n || memcmp(copied, a->slots, bytes) != 0) {
        memcpy(copied, a->slots, bytes);
        *n = a->n;
        kvant_cuda_record_error(memory, kvant_cuda_memory_copy(to, a->slots, bytes, memory->stream),
                                "append");
    }
    return to;
}

static bool is_rotated(const cuda_append *a)
{
    return kvant_cuda_rotates(a->part, a->transform_id);
}

/* Scratch memory for fp16 rows of a role, kv head after kv head. */
static kvant_cuda_pages scratch_of(const cuda_part *part)
{
    const size_t page = part->tensor->open_page_bytes,
                 head = KVANT_CACHE_BATCH / KVANT_PAGE_TOKENS * page;
    return (kvant_cuda_pages){ (uint8_t *)part->memory->gathered.at +
                                   (size_t)part->role * part->tensor->n_kv_heads * head,
                               page, head };
}

static bool rounds(const cuda_part *part)
{
    return kvant_cuda_has_exact(part) && !part->floats;
}

static kvant_status make_scratch(const cuda_layer *layer)
{
    const cuda_part *part = &layer->parts[rounds(&layer->parts[0]) ? 0 : 1];
    const size_t bytes = 2 * part->tensor->n_kv_heads * scratch_of(part).head_stride;
    return rounds(part) ? kvant_cuda_grow(&part->memory->gathered, bytes, "allocating rows")
                        : KVANT_OK;
}

static kvant_cuda_rows rounded(const cuda_append *a, kvant_cuda_rows *rows)
{
    const kvant_cuda_pages to = scratch_of(a->part);
    const kvant_cuda_rows from = { .codec = a->part->codec,
                                   .pages = rows->pages,
                                   .rows = to.base,
                                   .token_stride = a->part->tensor->head_dim,
                                   .head_stride = to.head_stride / sizeof(uint16_t) };
    rows->codec = kvant_cuda_transform(a->part, a->transform_id).open_codec;
    rows->pages = to;
    return from;
}

/* In a cache with an exact part, rows without a page are rounded to fp16 as well. So a row has the
 * same codes whether it was exact for a while or not. */
static void round_rows(cuda_memory *memory, const cuda_append *k, const cuda_append *v,
                       kvant_cuda_kernel_append_args *args)
{
    kvant_cuda_kernel_append_args first = *args;
    if (k)
        args->k = rounded(k, &first.k);
    if (v)
        args->v = rounded(v, &first.v);
    first.slots = memory->arguments->rows;
    first.k_feedback = first.centroids[0] = first.centroids[1] = NULL;
    args->type = KVANT_CUDA_F16;
    args->transformed = 1;
    args->k_compact = NULL;
    kvant_cuda_record_error(memory, kvant_cuda_kernel_append(&first, memory->stream), "append");
}

/* Appends keys, values, or both with the same slots. */
static void launch(cuda_memory *memory, const cuda_append *k, const cuda_append *v)
{
    const cuda_append *any = k ? k : v;
    kvant_cuda_kernel_append_args args = { .size = sizeof args,
                                           .type = KVANT_CUDA_F32,
                                           .n_tokens = (uint32_t)any->n,
                                           .n_kv_heads = any->part->tensor->n_kv_heads,
                                           .slots = copy_slots(memory, any),
                                           .refused = memory->refused,
                                           .exact = { k && k->exact ? k->part->floats : NULL,
                                                      v && v->exact ? v->part->floats : NULL } };
    if (k)
        kvant_cuda_add_rows(k, &args);
    if (v)
        kvant_cuda_add_rows(v, &args);
    args.transformed = is_rotated(any);
    args.centroids[KVANT_ROLE_K] = k && !k->open ? k->part->centroids : NULL;
    args.centroids[KVANT_ROLE_V] = v && !v->open ? v->part->centroids : NULL;
    args.k_feedback = k && !k->open ? k->part->feedback : NULL;
    if (!any->open && rounds(any->part))
        round_rows(memory, k, v, &args);
    kvant_cuda_record_error(memory, kvant_cuda_kernel_append(&args, memory->stream), "append");
}

/* Whether one launch can append keys and values. */
static bool go_together(const cuda_append *k, const cuda_append *v)
{
    return k->n == v->n && k->open == v->open && k->exact == v->exact &&
           rounds(k->part) == rounds(v->part) && is_rotated(k) == is_rotated(v) &&
           memcmp(k->slots, v->slots, k->n * sizeof *k->slots) == 0;
}

static void flush(cuda_memory *memory)
{
    cuda_append *k = &memory->pending[KVANT_ROLE_K], *v = &memory->pending[KVANT_ROLE_V];
    if (k->part && v->part && go_together(k, v)) {
        launch(memory, k, v);
    } else {
        if (k->part)
            launch(memory, k, NULL);
        if (v->part)
            launch(memory, NULL, v);
    }
    k->part = v->part = NULL;
}

static cuda_part *part_of(const kvant_tensor *tensor)
{
    return tensor->device_context;
}

/* Whether one launch can write the rows of two blocks: both open, or both sealed, with one
 * transform. */
static bool same_kind(const kvant_block *a, const kvant_block *b)
{
    return (a->open_page >= 0) == (b->open_page >= 0) && a->transform_id == b->transform_id;
}

/* Begins a launch for rows first .. first + n - 1 of a batch. */
static cuda_append *begin(cuda_part *part, const kvant_batch *batch, const kvant_run *run, size_t n)
{
    cuda_append *a = &part->memory->pending[part->role];
    const kvant_block *block = &part->tensor->blocks[run->block];
    if (a->part)
        flush(part->memory);
    a->part = part;
    a->rows = batch->rows + run->first * batch->stride;
    a->stride = batch->stride;
    a->n = n;
    a->transform_id = block->transform_id;
    a->open = block->open_page >= 0;
    a->exact = false;
    memset(a->slots, 0xff, n * sizeof *a->slots); /* -1 */
    return a;
}

/* Adds the slots of a run to a launch. page: the open or the exact page of the run's block. */
static void add_slots(cuda_append *a, const kvant_batch *batch, const kvant_run *run, int32_t page,
                      size_t first)
{
    for (size_t i = run->first; i < run->first + run->n; i++)
        a->slots[i - first] =
            a->open ? (int64_t)page * KVANT_PAGE_TOKENS + batch->slots[i] % KVANT_PAGE_TOKENS
                    : batch->slots[i];
}

/* The exact page of the rows of a run, or KVANT_NO_PAGE. */
static int32_t exact_page(cuda_part *part, const kvant_run *run)
{
    if (part->tensor->blocks[run->block].open_page < 0)
        return kvant_cuda_exact_page_for(part, run->block, run->mask);
    kvant_cuda_exact_drop(part, run->block);
    return KVANT_NO_PAGE;
}

/* Encodes a batch, with one launch per kind of block (same_kind). */
static void encode(const kvant_tensor *tensor, const kvant_batch *batch)
{
    cuda_part *part = part_of(tensor);
    const kvant_run *last = &batch->runs[batch->n_runs - 1];
    uint64_t taken = 0; /* at most 64 runs */
    int32_t exact[64];
    for (uint32_t i = 0; i < batch->n_runs; i++)
        exact[i] = exact_page(part, &batch->runs[i]);
    for (uint32_t i = 0; i < batch->n_runs; i++) {
        const kvant_run *run = &batch->runs[i];
        if (taken >> i & 1)
            continue;
        cuda_append *a = begin(part, batch, run, last->first + last->n - run->first);
        a->exact = exact[i] >= 0;
        a->open |= a->exact;
        for (uint32_t j = i; j < batch->n_runs; j++) {
            const kvant_block *block = &tensor->blocks[batch->runs[j].block];
            if (taken >> j & 1 || (exact[j] >= 0) != a->exact ||
                !same_kind(&tensor->blocks[run->block], block))
                continue;
            add_slots(a, batch, &batch->runs[j], a->exact ? exact[j] : block->open_page,
                      run->first);
            taken |= (uint64_t)1 << j;
        }
    }
}

static uint32_t n_written(uint64_t written)
{
    uint32_t n = 0;
    while (n < KVANT_PAGE_TOKENS && written >> n & 1)
        n++;
    return n;
}

/* Whether blocks that their tensor seals may stay exact. This needs rows that are rounded to fp16
 * before encoding and encoded one by one. */
static bool keeps_sealed(const kvant_tensor *tensor)
{
    return rounds(part_of(tensor)) && kvant_tensor_codec_info(tensor)->block_tokens == 1;
}

/* Keeps the rows of a block that its tensor seals as exact rows, if the plan has a page for them.
 * These were pending for a first transform, or were expressed in another one. */
static bool stays_exact(const kvant_tensor *tensor, int32_t page, uint32_t block)
{
    kvant_cuda_exact_drop(part_of(tensor), block);
    return keeps_sealed(tensor) &&
           kvant_cuda_exact_store(part_of(tensor), block, tensor->blocks[block].written,
                                  kvant_open_page_of(tensor, page, 0));
}

static void seal(const kvant_tensor *tensor, const int32_t *pages, size_t n_pages)
{
    cuda_part *part = part_of(tensor);
    cuda_memory *memory = part->memory;
    int32_t arrays[3][64];
    uint32_t n = 0;
    flush(memory);
    for (size_t i = 0; i < n_pages; i++) {
        const uint32_t block = (uint32_t)tensor->open_pages[pages[i]].block;
        if (stays_exact(tensor, pages[i], block))
            continue;
        arrays[0][n] = pages[i];
        arrays[1][n] = (int32_t)block;
        arrays[2][n++] = (int32_t)n_written(tensor->blocks[block].written);
    }
    if (!n)
        return;
    const kvant_cuda_seal_pages of = { part->codec, kvant_cuda_pages_of(part, true),
                                       kvant_cuda_pages_of(part, false) };
    int32_t(*device)[64] = memory->arguments->seal;
    kvant_cuda_seal_args args = { .size = sizeof args,
                                  .n_blocks = n,
                                  .n_kv_heads = tensor->n_kv_heads,
                                  .from = device[0],
                                  .to = device[1],
                                  .tokens = device[2],
                                  .refused = memory->refused };
    *(part->role == KVANT_ROLE_K ? &args.k : &args.v) = of;
    args.k_feedback = part->feedback; /* only keys have one */
    args.centroids[part->role] = part->centroids;
    kvant_cuda_record_error(
        memory, kvant_cuda_memory_copy(device, arrays, sizeof arrays, memory->stream), "seal");
    kvant_cuda_record_error(memory, kvant_cuda_seal(&args, memory->stream), "seal");
}

/* Calls `what` for each block whose sealed pages overlap an array of bytes, so that its exact rows
 * are brought up to date or dropped. */
static void update_exact_rows(const kvant_tensor *tensor, const void *at, size_t bytes,
                              void (*what)(cuda_part *, uint32_t))
{
    const uint8_t *first = at, *end = tensor->sealed + tensor->n_blocks * tensor->block_bytes;
    if (first < tensor->sealed || first >= end)
        return;
    const size_t from = (size_t)(first - tensor->sealed);
    for (size_t block = from / tensor->block_bytes; block * tensor->block_bytes < from + bytes;
         block++)
        what(part_of(tensor), (uint32_t)block);
}

static void read_bytes(const kvant_tensor *tensor, void *to, const void *from, size_t bytes)
{
    cuda_memory *memory = part_of(tensor)->memory;
    flush(memory);
    update_exact_rows(tensor, from, bytes, kvant_cuda_exact_encode);
    kvant_cuda_record_error(memory, kvant_cuda_memory_read(to, from, bytes, memory->stream),
                            "reading pages");
}

static void copy_bytes(const kvant_tensor *tensor, void *to, const void *from, size_t bytes)
{
    cuda_memory *memory = part_of(tensor)->memory;
    flush(memory);
    update_exact_rows(tensor, from, bytes, kvant_cuda_exact_encode);
    update_exact_rows(tensor, to, bytes, kvant_cuda_exact_drop);
    kvant_cuda_record_error(memory, kvant_cuda_memory_copy(to, from, bytes, memory->stream),
                            "copying pages");
}

static void clear_bytes(const kvant_tensor *tensor, void *at, size_t bytes)
{
    cuda_memory *memory = part_of(tensor)->memory;
    flush(memory);
    update_exact_rows(tensor, at, bytes, kvant_cuda_exact_drop);
    kvant_cuda_record_error(memory, kvant_cuda_memory_clear(at, bytes, memory->stream),
                            "clearing pages");
}

static void note(const kvant_tensor *tensor, const kvant_statistics *seen, const float *rows,
                 size_t stride, size_t n, size_t taken)
{
    cuda_memory *memory = part_of(tensor)->memory;
    const kvant_cuda_note_args args = { .rows = rows,
                                        .stride = stride,
                                        .width = seen->width,
                                        .n = (uint32_t)n,
                                        .taken = (uint32_t)taken,
                                        .seen = seen->n,
                                        .parts = KVANT_STATISTICS_PARTS,
                                        .sum = seen->sum,
                                        .min = seen->min,
                                        .max = seen->max };
    kvant_cuda_record_error(memory, kvant_cuda_note_rows(&args, memory->stream), "append");
}

static const float *look(const kvant_tensor *tensor, const float *rows, size_t stride, size_t n)
{
    const cuda_part *part = part_of(tensor);
    cuda_memory *memory = part->memory;
    kvant_status status = KVANT_ERR_ARGUMENT;
    const float *seen = NULL;
    if (stride == kvant_tensor_width(tensor))
        seen = kvant_cuda_read_back(memory, &memory->seen[part->role], rows, n * stride, &status);
    kvant_cuda_record_error(memory, status, "append");
    return seen;
}

static const void *exact(const kvant_tensor *tensor, uint32_t block)
{
    const cuda_part *part = part_of(tensor);
    const int32_t page = keeps_sealed(tensor) ? kvant_cuda_exact_page(part, block) : KVANT_NO_PAGE;
    return page >= 0 ? kvant_cuda_exact_at(part, page) : NULL;
}

static bool store_exact(const kvant_tensor *tensor, uint32_t block, uint64_t dirty,
                        const void *pages)
{
    cuda_part *part = part_of(tensor);
    if (!keeps_sealed(tensor) || !pages)
        return keeps_sealed(tensor);
    flush(part->memory);
    kvant_cuda_exact_plan_block(part, block);
    return kvant_cuda_exact_store(part, block, dirty, pages);
}

static kvant_status status_of(const cuda_memory *memory)
{
    return kvant_cuda_report_error(memory->status, memory->failed);
}

static kvant_status status(const kvant_tensor *tensor)
{
    return status_of(part_of(tensor)->memory);
}

const kvant_page_device kvant_cuda_page_device = { .read = read_bytes,
                                                   .copy = copy_bytes,
                                                   .clear = clear_bytes,
                                                   .encode = encode,
                                                   .seal = seal,
                                                   .note = note,
                                                   .look = look,
                                                   .status = status,
                                                   .exact = exact,
                                                   .store_exact = store_exact };

/* Rows */

/* Checks rows. seen[role]: the rows on the host if the tensor has to check them, otherwise NULL. */
static kvant_status check(cuda_memory *memory, const cuda_layer *layer, const float *const rows[2],
                          uint32_t n, const float *seen[2])
{
    const size_t width = kvant_tensor_width(layer->parts[0].tensor);
    const kvant_cuda_values numbers = { { rows[0], rows[1] },
                                        { n * width, n * width },
                                        memory->arguments->largest };
    float largest[2];
    KVANT_FORWARD(
        kvant_cuda_report_error(kvant_cuda_largest(&numbers, largest, memory->stream), "append"));
    for (int role = 0; role < 2; role++) {
        const kvant_tensor *tensor = layer->parts[role].tensor;
        if (!(largest[role] <= kvant_tensor_safe_input(tensor)))
            seen[role] = look(tensor, rows[role], width, n);
    }
    return status_of(memory);
}

kvant_status kvant_cuda_refused(cuda_memory *memory)
{
    const uint32_t refused = memory->refused ? *(volatile uint32_t *)memory->refused : 0;
    if (!refused)
        return KVANT_OK;
    *memory->refused = 0;
    return kvant_fail(
        NULL, refused & KVANT_CUDA_ROW_NONFINITE ? KVANT_ERR_NONFINITE : KVANT_ERR_RANGE,
        "cache on cuda: rows of an earlier append held a NaN, an infinity or a number beyond fp16, "
        "and were not written: their slots hold zeros or older rows");
}

/* Copies queries to the host, where matrices are made. */
static kvant_status note_queries(kvant_cache *cache, uint32_t layer, const kvant_queries *queries)
{
    kvant_tensor *keys = *kvant_cache_tensor(cache, layer, KVANT_ROLE_K);
    kvant_queries host = *queries;
    if (!kvant_tensor_wants_queries(keys, queries->n_tokens))
        return KVANT_OK;
    KVANT_RETURN_IF(!queries->n_heads, KVANT_ERR_ARGUMENT);
    const size_t n = (queries->n_tokens - 1) * queries->token_stride +
                     (queries->n_heads - 1) * queries->head_stride + keys->head_dim;
    cuda_memory *memory = cache->memory;
    kvant_status status;
    host.q = kvant_cuda_read_back(memory, &memory->queries_read, queries->q, n, &status);
    KVANT_FORWARD(kvant_cuda_report_error(status, "copying queries"));
    return kvant_tensor_note_queries(keys, &host, cache->params.n_threads);
}

static kvant_status append(kvant_cache *cache, uint32_t layer, const float *k, const float *v,
                           uint32_t n)
{
    cuda_memory *memory = cache->memory;
    cuda_layer *l = kvant_cuda_layer(cache, layer);
    const float *rows[2] = { k, v }, *seen[2] = { NULL, NULL };
    kvant_status written = kvant_cuda_refused(memory);
    if (written == KVANT_OK && !memory->refused)
        written = check(memory, l, rows, n, seen);
    KVANT_FORWARD(written);
    const size_t width = kvant_tensor_width(l->parts[0].tensor);
    KVANT_FORWARD(make_scratch(l));
    kvant_cuda_exact_plan(cache, layer, n);
    const kvant_rows of[] = { { l->parts[0].tensor, k, seen[0], width },
                              { l->parts[1].tensor, v, seen[1], width } };
    written = kvant_tensor_write_seen(of, 2, cache->slots, n, cache->params.n_threads);
    flush(memory);
    return written == KVANT_OK ? status_of(memory) : written;
}

const kvant_device kvant_device_cuda = { .create = kvant_cuda_layers_create,
                                         .destroy = kvant_cuda_layers_destroy,
                                         .release = kvant_cuda_exact_release,
                                         .append = append,
                                         .attend = kvant_cuda_layers_attend,
                                         .read = kvant_cuda_layers_read,
                                         .note_queries = note_queries,
                                         .steps_begin = kvant_cuda_steps_begin,
                                         .steps_next = kvant_cuda_steps_next,
                                         .step = kvant_cuda_step };
