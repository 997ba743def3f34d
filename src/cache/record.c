/* record.c - exports blocks and imports them again. A record holds the rows of its blocks and each
 * of their transforms once. It refuses damaged records, and changes nothing before it has checked
 * everything. format.md, "Records", has the bytes. All parts have a multiple of 8 bytes. */
#include <stdatomic.h>
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../base/alloc.h"
#include "../base/error.h"
#include "../base/fnv.h"
#include "../base/parallel.h"
#include "record.h"
#include "transform_bytes.h"

/* Exporting */

static kvant_record_block header_of(const kvant_tensor *tensor, const kvant_block_slots *from)
{
    const kvant_block *b = &tensor->blocks[from->block];
    return (kvant_record_block){
        .written = b->written & from->slots,
        .coded = kvant_slots_coded(tensor, from->block, from->slots),
        .form = (kvant_slots_as_open(tensor, from->block, from->slots) ? KVANT_OPEN_PAGES : 0) |
                (kvant_shifts_any(tensor, from->block, from->slots) ? KVANT_SHIFTED : 0),
        .position = b->position
    };
}

/* Whether all blocks exist and differ. Blocks mostly ascend; then each needs one comparison. */
static bool are_valid(const kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n)
{
    uint32_t beyond = 0; /* above all blocks so far */
    for (uint32_t i = 0; i < n; i++) {
        if (blocks[i].block >= tensor->n_blocks)
            return false;
        for (uint32_t j = 0; blocks[i].block < beyond && j < i; j++)
            if (blocks[j].block == blocks[i].block)
                return false;
        beyond = blocks[i].block < beyond ? beyond : blocks[i].block + 1;
    }
    return true;
}

/* Numbers the transforms of the blocks in the order of their first use; returns how many. */
static uint32_t number_transforms(const kvant_tensor *tensor, const kvant_block_slots *blocks,
                                  uint32_t n, int32_t number[KVANT_MAX_TRANSFORMS])
{
    uint32_t n_transforms = 0;
    for (uint32_t id = 0; id < KVANT_MAX_TRANSFORMS; id++)
        number[id] = -1;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t id = tensor->blocks[blocks[i].block].transform_id;
        if (number[id] < 0)
            number[id] = (int32_t)n_transforms++;
    }
    return n_transforms;
}

kvant_status kvant_tensor_record_size(const kvant_tensor *tensor, const kvant_block_slots *blocks,
                                      uint32_t n, size_t *bytes)
{
    int32_t number[KVANT_MAX_TRANSFORMS];
    KVANT_RETURN_IF(!tensor || !blocks || !bytes || !are_valid(tensor, blocks, n),
                    KVANT_ERR_ARGUMENT);
    *bytes = sizeof(kvant_record_header) + sizeof(uint64_t);
    number_transforms(tensor, blocks, n, number);
    for (uint32_t id = 0; id < KVANT_MAX_TRANSFORMS; id++)
        if (number[id] >= 0)
            *bytes += sizeof(kvant_record_transform) +
                      kvant_transform_bytes(tensor, kvant_transform_kind(tensor, id));
    for (uint32_t i = 0; i < n; i++) {
        const kvant_record_block header = header_of(tensor, &blocks[i]);
        *bytes += sizeof header + kvant_record_body_bytes(tensor, &header);
    }
    return KVANT_OK;
}

static uint8_t *export_transforms(const kvant_tensor *tensor,
                                  const int32_t number[KVANT_MAX_TRANSFORMS], uint32_t n,
                                  uint8_t *at)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t id = 0;
        while (number[id] != (int32_t)i)
            id++;
        const kvant_record_transform header = { kvant_transform_kind(tensor, id), 0 };
        memcpy(at, &header, sizeof header);
        kvant_transform_export(tensor, id, at + sizeof header);
        at += sizeof header + kvant_transform_bytes(tensor, header.kind);
    }
    return at;
}

static uint32_t age_of(const kvant_tensor *tensor, uint32_t block)
{
    const uint64_t age = tensor->blocks[block].open_page >= 0 ? kvant_block_age(tensor, block) : 0;
    return age < UINT32_MAX ? (uint32_t)age : UINT32_MAX;
}

static kvant_status export_block(const kvant_tensor *tensor, const kvant_block_slots *from,
                                 const kvant_record_block *header, uint8_t *at)
{
    memcpy(at, header, sizeof *header);
    at += sizeof *header;
    if (header->form & KVANT_SHIFTED)
        kvant_shifts_export(tensor, from->block, from->slots, at);
    at += kvant_record_shift_bytes(tensor, header);
    KVANT_FORWARD(kvant_slots_read(tensor, from->block, from->slots, at));
    return header->coded ? kvant_slots_read_codes(tensor, from->block, header->coded,
                                                  at + kvant_record_open_bytes(tensor, header))
                         : KVANT_OK;
}

/* Copying a block takes about as long as waking a thread. */
#define BLOCKS_FOR_THREADS 16u

static uint32_t threads_for(const kvant_tensor *tensor, uint32_t n_blocks, uint32_t n_threads)
{
    return tensor->device || n_blocks < BLOCKS_FOR_THREADS ? 1 : n_threads;
}

/* Blocks are independent, so a work item is a block. */
typedef struct exported_block {
    kvant_record_block header;
    uint8_t *at;
} exported_block;

typedef struct export_job {
    const kvant_tensor *tensor;
    const kvant_block_slots *blocks;
    exported_block *list;
    atomic_int status;
} export_job;

static void export_item(void *context, size_t i, uint32_t worker)
{
    export_job *job = context;
    const kvant_status status =
        export_block(job->tensor, &job->blocks[i], &job->list[i].header, job->list[i].at);
    (void)worker;
    if (status != KVANT_OK)
        atomic_store(&job->status, (int)status);
}

static kvant_status export_blocks(const kvant_tensor *tensor, const kvant_block_slots *blocks,
                                  exported_block *list, uint32_t n, uint32_t n_threads)
{
    export_job job = { .tensor = tensor, .blocks = blocks, .list = list };
    atomic_init(&job.status, KVANT_OK);
    kvant_parallel_for(n, threads_for(tensor, n, n_threads), export_item, &job);
    return (kvant_status)atomic_load(&job.status);
}

kvant_status kvant_record_export(const kvant_tensor *tensor, const kvant_block_slots *blocks,
                                 uint32_t n, const uint32_t *ages, void *data, size_t bytes,
                                 uint32_t n_threads)
{
    int32_t number[KVANT_MAX_TRANSFORMS];
    size_t needed;
    uint8_t *at = data;
    KVANT_FORWARD(kvant_tensor_record_size(tensor, blocks, n, &needed));
    KVANT_RETURN_IF(!data || bytes != needed, KVANT_ERR_ARGUMENT);
    const kvant_record_header header = { KVANT_RECORD_MAGIC, bytes, kvant_tensor_scheme(tensor), n,
                                         number_transforms(tensor, blocks, n, number) };
    memcpy(at, &header, sizeof header);
    at = export_transforms(tensor, number, header.n_transforms, at + sizeof header);
    exported_block *list = kvant_alloc(n + 1, sizeof *list);
    KVANT_RETURN_IF(!list, KVANT_ERR_MEMORY);
    for (uint32_t i = 0; i < n; i++) {
        kvant_record_block of = header_of(tensor, &blocks[i]);
        of.transform = (uint32_t)number[tensor->blocks[blocks[i].block].transform_id];
        of.age = !(of.form & KVANT_OPEN_PAGES) ? 0
                 : ages                        ? ages[i]
                                               : age_of(tensor, blocks[i].block);
        list[i] = (exported_block){ of, at };
        at += sizeof of + kvant_record_body_bytes(tensor, &of);
    }
    const kvant_status status = export_blocks(tensor, blocks, list, n, n_threads);
    kvant_free(list);
    KVANT_FORWARD(status);
    const uint64_t checksum = kvant_checksum_of(data, bytes - sizeof checksum);
    memcpy(at, &checksum, sizeof checksum);
    return KVANT_OK;
}

kvant_status kvant_tensor_export_record(const kvant_tensor *tensor, const kvant_block_slots *blocks,
                                        uint32_t n, void *data, size_t bytes, uint32_t n_threads)
{
    return kvant_record_export(tensor, blocks, n, NULL, data, bytes, n_threads);
}

/* A record of one block */

static bool has_open_pages(const kvant_tensor *tensor)
{
    return tensor->n_open_pages || kvant_exact_store(tensor, 0, 0, NULL);
}

size_t kvant_tensor_export_size(const kvant_tensor *tensor)
{
    if (!tensor)
        return 0;
    const kvant_record_block largest = {
        .coded = 1,
        .form = (has_open_pages(tensor) ? KVANT_OPEN_PAGES : 0) |
                (kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_K ? KVANT_SHIFTED : 0)
    };
    return sizeof(kvant_record_header) + sizeof(kvant_record_transform) +
           kvant_transform_bytes(tensor,
                                 tensor->learning ? KVANT_BYTES_CENTERS : KVANT_BYTES_AFFINE) +
           sizeof largest + kvant_record_body_bytes(tensor, &largest) + sizeof(uint64_t);
}

kvant_status kvant_tensor_export(const kvant_tensor *tensor, uint32_t block, void *data,
                                 size_t bytes, size_t *used)
{
    const kvant_block_slots whole = { UINT64_MAX, block };
    const uint32_t age = 0;
    size_t needed;
    KVANT_RETURN_IF(!data || !used, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_tensor_record_size(tensor, &whole, 1, &needed));
    KVANT_RETURN_IF(bytes < needed, KVANT_ERR_ARGUMENT);
    *used = needed;
    return kvant_record_export(tensor, &whole, 1, &age, data, needed, 1);
}

/* Importing. Nothing changes in the tensor until everything was checked. */

static bool take(const uint8_t **at, size_t *left, size_t bytes)
{
    if (*left < bytes)
        return false;
    *at += bytes;
    *left -= bytes;
    return true;
}

static kvant_status read_transforms(const kvant_tensor *tensor, const uint8_t **at, size_t *left,
                                    kvant_record *r)
{
    for (uint32_t i = 0; i < r->n_transforms; i++) {
        kvant_record_transform header;
        const uint8_t *from = *at;
        if (!take(at, left, sizeof header))
            return kvant_damaged("it is cut short");
        memcpy(&header, from, sizeof header);
        if (header.kind >= KVANT_BYTES_KINDS || header.zero)
            return kvant_damaged("a transform is of another version of kvant");
        KVANT_FORWARD(kvant_transform_accepts(tensor, header.kind));
        if (!take(at, left, kvant_transform_bytes(tensor, header.kind)))
            return kvant_damaged("it is cut short");
        r->transforms[i] = from;
    }
    return KVANT_OK;
}

/* Checks open rows like written ones, because they are sealed later, which must not fail. The pages
 * may have any alignment. */
static kvant_status check_open_rows(const kvant_tensor *tensor, const uint8_t *pages)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
            uint16_t half[KVANT_MAX_HEAD_DIM];
            float y[KVANT_MAX_HEAD_DIM];
            memcpy(half,
                   pages + head * tensor->open_page_bytes + t * tensor->head_dim * sizeof *half,
                   tensor->head_dim * sizeof *half);
            kvant_codec_decode_open(tensor->codecs[head], kernels, half, 0, 1, y);
            if (!kvant_codec_fits_open(tensor->codecs[head], kernels, y))
                return kvant_damaged("a row cannot be encoded by its codec");
        }
    return KVANT_OK;
}

/* used: the ids of shifts that the tensor and the record need so far. */
static kvant_status check_shifts(kvant_tensor *tensor, const kvant_record_block *header,
                                 const uint8_t *body, uint32_t *used)
{
    uint8_t ids[KVANT_PAGE_TOKENS];
    if (!(header->form & KVANT_SHIFTED))
        return KVANT_OK;
    if (tensor->device || kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "exported block: its keys were shifted, which only keys in the "
                          "computer's memory support");
    return kvant_shifts_read(tensor, header->written, body, used, ids);
}

/* Whether a header can stand for a block with these slots. */
static bool fits(const kvant_tensor *tensor, const kvant_record_block *header, uint64_t slots)
{
    const bool open = header->form & KVANT_OPEN_PAGES;
    return header->form <= (KVANT_OPEN_PAGES | KVANT_SHIFTED) && header->written == slots &&
           !(header->coded & ~(open ? slots : 0)) &&
           !kvant_slots_share_scales(tensor, slots, header->coded);
}

static bool is_learned(const kvant_record *r, const kvant_record_block *header)
{
    kvant_record_transform transform;
    memcpy(&transform, r->transforms[header->transform], sizeof transform);
    return transform.kind != KVANT_BYTES_NOTHING;
}

/* Whether the device keeps open rows as they are. Rows that are pending for a first transform lie
 * in the tensor's own pages instead. */
static bool stays_exact(const kvant_tensor *tensor, uint32_t block, bool learned)
{
    return (learned || !tensor->learns) && kvant_exact_store(tensor, block, 0, NULL);
}

static kvant_status check_blocks(kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n,
                                 const uint8_t *at, size_t left, kvant_record *r)
{
    uint32_t used = 0, n_transforms = 0;
    for (uint32_t i = 0; i < n; i++) {
        kvant_record_block header;
        const uint8_t *from = at;
        if (!take(&at, &left, sizeof header))
            return kvant_damaged("it is cut short");
        memcpy(&header, from, sizeof header);
        const uint8_t *body = at;
        if (!fits(tensor, &header, r->of_any_slots ? header.written : blocks[i].slots))
            return kvant_damaged("a block has other slots than its record says");
        if (header.position != KVANT_NO_POSITION && !kvant_is_block_position(header.position))
            return kvant_damaged("a block has a position that no row can have");
        if (header.transform > n_transforms || header.transform >= r->n_transforms)
            return kvant_damaged("its transforms are not in the order of their use");
        n_transforms += header.transform == n_transforms;
        if (!take(&at, &left, kvant_record_body_bytes(tensor, &header)))
            return kvant_damaged("it is cut short");
        r->any_written |= header.written != 0;
        KVANT_FORWARD(check_shifts(tensor, &header, body, &used));
        if (header.form & KVANT_OPEN_PAGES)
            KVANT_FORWARD(
                check_open_rows(tensor, body + kvant_record_shift_bytes(tensor, &header)));
        KVANT_RETURN_IF(header.form & KVANT_OPEN_PAGES && !r->elsewhere &&
                            !stays_exact(tensor, blocks[i].block, is_learned(r, &header)) &&
                            !kvant_block_finds_page(tensor, blocks[i].block),
                        kvant_no_page());
    }
    return left || n_transforms != r->n_transforms
               ? kvant_damaged("its size does not match its head")
               : KVANT_OK;
}

static kvant_status check_record(kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n,
                                 const uint8_t *data, size_t bytes, kvant_record *r)
{
    kvant_record_header header;
    uint64_t checksum;
    if (bytes < sizeof header + sizeof checksum || bytes % sizeof checksum)
        return kvant_damaged("it is cut short");
    memcpy(&header, data, sizeof header);
    if (header.magic != KVANT_RECORD_MAGIC || header.n_transforms > KVANT_MAX_TRANSFORMS)
        return kvant_damaged("not a record, or of another version of kvant");
    if (header.scheme != kvant_tensor_scheme(tensor))
        return kvant_damaged(
            "it was made with other codecs, another shape of heads or another seed");
    if (header.bytes != bytes || header.n_blocks != n)
        return kvant_damaged("its size does not match its head");
    memcpy(&checksum, data + bytes - sizeof checksum, sizeof checksum);
    if (!r->is_checked && checksum != kvant_checksum_of(data, bytes - sizeof checksum))
        return kvant_damaged("its checksum does not match");
    const uint8_t *at = data + sizeof header;
    size_t left = bytes - sizeof header - sizeof checksum;
    r->n_transforms = header.n_transforms;
    KVANT_FORWARD(read_transforms(tensor, &at, &left, r));
    r->blocks = at;
    return check_blocks(tensor, blocks, n, at, left, r);
}

/* Finds or makes all transforms of a record. Each one counts as used until all are found. */
static kvant_status import_transforms(kvant_tensor *tensor, const kvant_record *r,
                                      uint32_t n_threads, uint32_t ids[KVANT_MAX_TRANSFORMS])
{
    kvant_status status = KVANT_OK;
    uint32_t n = 0;
    for (; n < r->n_transforms && status == KVANT_OK; n++) {
        kvant_record_transform header;
        memcpy(&header, r->transforms[n], sizeof header);
        status = kvant_transform_import(tensor, r->transforms[n] + sizeof header, header.kind,
                                        n_threads, &ids[n]);
        if (status == KVANT_OK)
            tensor->transforms[ids[n]].n_blocks++;
    }
    for (uint32_t i = 0; i < n; i++)
        if (i + 1 < n || status == KVANT_OK)
            tensor->transforms[ids[i]].n_blocks--;
    return status;
}

/* Cannot fail after check_shifts: clearing blocks frees ids, and the memory is there. */
static kvant_status import_shifts(kvant_tensor *tensor, uint32_t block,
                                  const kvant_record_block *header, const uint8_t *body)
{
    uint8_t ids[KVANT_PAGE_TOKENS];
    uint32_t used = 0;
    if (!(header->form & KVANT_SHIFTED))
        return KVANT_OK;
    KVANT_FORWARD(kvant_shifts_read(tensor, header->written, body, &used, ids));
    kvant_shifts_set_block(tensor, block, ids);
    return KVANT_OK;
}

/* A block of a record whose sizes were checked. */
typedef struct imported_block {
    uint32_t block;
    kvant_record_block header;
    const uint8_t *body, *pages, *codes; /* codes: NULL if there are none */
} imported_block;

static imported_block imported_of(const kvant_tensor *tensor, uint32_t block, const uint8_t *from)
{
    imported_block b = { .block = block };
    memcpy(&b.header, from, sizeof b.header);
    b.body = from + sizeof b.header;
    b.pages = b.body + kvant_record_shift_bytes(tensor, &b.header);
    if (kvant_record_has_codes(&b.header) && b.header.written)
        b.codes = b.pages + kvant_record_open_bytes(tensor, &b.header);
    return b;
}

typedef struct import_job {
    kvant_tensor *tensor;
    const imported_block *list;
} import_job;

static void import_codes(void *context, size_t i, uint32_t worker)
{
    const import_job *job = context;
    const imported_block *b = &job->list[i];
    (void)worker;
    if (b->codes)
        kvant_pages_copy(job->tensor, kvant_sealed_page(job->tensor, b->block, 0), b->codes,
                         job->tensor->block_bytes);
}

/* Makes the blocks empty and writes their codes. Pages that codes fill are not zeroed before. */
static void import_all_codes(kvant_tensor *tensor, const imported_block *list, uint32_t n,
                             uint32_t n_threads)
{
    import_job job = { tensor, list };
    for (uint32_t i = 0; i < n; i++) {
        tensor->blocks[list[i].block].resident &= !list[i].codes;
        kvant_block_clear(tensor, list[i].block);
    }
    kvant_parallel_for(n, threads_for(tensor, n, n_threads), import_codes, &job);
}

/* Everything else of a block, whose codes are there. */
static kvant_status import_block(kvant_tensor *tensor, const imported_block *from,
                                 const uint32_t *ids)
{
    const kvant_record_block header = from->header;
    const uint32_t block = from->block;
    const bool open = header.form & KVANT_OPEN_PAGES;
    const uint32_t id = ids[header.transform];
    const uint64_t dirty = header.written & ~header.coded;
    if (!header.written)
        return KVANT_OK;
    const bool exact = open && stays_exact(tensor, block, tensor->transforms[id].learned);
    const int32_t page =
        open && !exact ? kvant_block_acquire(tensor, block, header.age) : KVANT_NO_PAGE;
    if (page >= 0) {
        tensor->open_pages[page].dirty = dirty;
        kvant_pages_copy(tensor, kvant_open_page_of(tensor, page, 0), from->pages,
                         kvant_open_block_bytes(tensor));
    }
    kvant_block_fill(tensor, block, id, header.position, header.written, NULL);
    tensor->blocks[block].resident = from->codes != NULL;
    if (tensor->transforms[id].learned) /* for the next block of the sequence */
        tensor->sequence_transforms[tensor->blocks[block].sequence] = (uint8_t)id;
    if (exact)
        tensor->blocks[block].resident = kvant_exact_store(tensor, block, dirty, from->pages);
    return import_shifts(tensor, block, &header, from->body);
}

/* The transform of the last block that has a learned one serves new rows. */
static void begin_transforms(kvant_tensor *tensor, const kvant_record *r, const uint32_t *ids)
{
    for (uint32_t i = r->n_transforms; i > 0 && kvant_transforms_pending(tensor); i--)
        if (tensor->transforms[ids[i - 1]].learned)
            kvant_transforms_begin(tensor, ids[i - 1]);
}

static kvant_status import_list(kvant_tensor *tensor, const imported_block *list, uint32_t n,
                                const kvant_record *r, uint32_t n_threads)
{
    uint32_t ids[KVANT_MAX_TRANSFORMS];
    kvant_status status = KVANT_OK;
    KVANT_FORWARD(import_transforms(tensor, r, n_threads, ids));
    if (r->any_written)
        begin_transforms(tensor, r, ids);
    import_all_codes(tensor, list, n, n_threads);
    for (uint32_t i = 0; i < n && status == KVANT_OK; i++)
        status = import_block(tensor, &list[i], ids);
    return status == KVANT_OK ? kvant_pages_status(tensor) : status;
}

kvant_status kvant_record_check(kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n,
                                const void *data, size_t bytes, kvant_record *r)
{
    KVANT_RETURN_IF(!tensor || !blocks || !data || !(r->elsewhere || are_valid(tensor, blocks, n)),
                    KVANT_ERR_ARGUMENT);
    return check_record(tensor, blocks, n, data, bytes, r);
}

kvant_status kvant_record_import(kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n,
                                 const kvant_record *r, uint32_t n_threads)
{
    imported_block *list = kvant_alloc(n + 1, sizeof *list);
    KVANT_RETURN_IF(!list, KVANT_ERR_MEMORY);
    const uint8_t *at = r->blocks;
    for (uint32_t i = 0; i < n; i++) {
        list[i] = imported_of(tensor, blocks[i].block, at);
        at = list[i].body + kvant_record_body_bytes(tensor, &list[i].header);
    }
    const kvant_status status = import_list(tensor, list, n, r, n_threads);
    kvant_free(list);
    return status;
}

static kvant_status import_record(kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n,
                                  const void *data, size_t bytes, uint32_t n_threads,
                                  kvant_record r)
{
    KVANT_FORWARD(kvant_record_check(tensor, blocks, n, data, bytes, &r));
    return kvant_record_import(tensor, blocks, n, &r, n_threads);
}

kvant_status kvant_tensor_import_record(kvant_tensor *tensor, const kvant_block_slots *blocks,
                                        uint32_t n, const void *data, size_t bytes,
                                        uint32_t n_threads)
{
    const kvant_record plain = { .of_any_slots = false };
    return import_record(tensor, blocks, n, data, bytes, n_threads, plain);
}

kvant_status kvant_tensor_import_checked_record(kvant_tensor *tensor,
                                                const kvant_block_slots *blocks, uint32_t n,
                                                const void *data, size_t bytes, uint32_t n_threads)
{
    const kvant_record checked = { .is_checked = true };
    return import_record(tensor, blocks, n, data, bytes, n_threads, checked);
}

kvant_status kvant_tensor_import(kvant_tensor *tensor, uint32_t block, const void *data,
                                 size_t bytes)
{
    const kvant_block_slots whole = { UINT64_MAX, block };
    const kvant_record any = { .of_any_slots = true };
    return import_record(tensor, &whole, 1, data, bytes, 1, any);
}
