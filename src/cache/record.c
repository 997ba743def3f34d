/* record.c - exports blocks together and imports them again. A record holds each transform once,
 * while an exported block (transfer.c) holds its own copy, which is often larger than its codes.
 * format.md, "Records", has the bytes. All parts have a multiple of 8 bytes. */
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../base/alloc.h"
#include "../base/error.h"
#include "../base/fnv.h"
#include "shift.h"
#include "transform_bytes.h"

#define RECORD_MAGIC 0x314345524e564bffu /* 0xff, then "KVNREC1" */

typedef struct record_header {
    uint64_t magic;
    uint64_t bytes;  /* of the whole record */
    uint64_t scheme; /* kvant_tensor_scheme */
    uint32_t n_blocks, n_transforms;
} record_header;
_Static_assert(sizeof(record_header) == 32, "format.md");

/* Before the bytes of a transform. */
typedef struct transform_header {
    uint32_t kind, zero;
} transform_header;

/* Before the shifts and the pages of a block. */
typedef struct block_header {
    uint64_t written;
    uint32_t form;      /* bits: the pages are open; slots have shifts */
    uint32_t transform; /* its place in the record */
    int32_t position;   /* KVANT_NO_POSITION: not known */
    uint32_t age;       /* of an open block: rows of its sequence that were written later */
} block_header;
_Static_assert(sizeof(block_header) == 24, "format.md");

enum { OPEN_PAGES = 1, SHIFTED = 2 };

static size_t body_bytes(const kvant_tensor *tensor, uint32_t form)
{
    return (form & SHIFTED ? kvant_shifts_export_bytes(tensor) : 0) +
           (form & OPEN_PAGES ? kvant_open_block_bytes(tensor) : tensor->block_bytes);
}

/* Exporting */

static uint32_t form_of(const kvant_tensor *tensor, const kvant_block_slots *b)
{
    return (kvant_slots_as_open(tensor, b->block, b->slots) ? OPEN_PAGES : 0) |
           (kvant_shifts_any(tensor, b->block, b->slots) ? SHIFTED : 0);
}

static bool are_valid(const kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (blocks[i].block >= tensor->n_blocks)
            return false;
        for (uint32_t j = 0; j < i; j++)
            if (blocks[j].block == blocks[i].block)
                return false;
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
    *bytes = sizeof(record_header) + sizeof(uint64_t);
    number_transforms(tensor, blocks, n, number);
    for (uint32_t id = 0; id < KVANT_MAX_TRANSFORMS; id++)
        if (number[id] >= 0)
            *bytes += sizeof(transform_header) +
                      kvant_transform_bytes(tensor, kvant_transform_kind(tensor, id));
    for (uint32_t i = 0; i < n; i++)
        *bytes += sizeof(block_header) + body_bytes(tensor, form_of(tensor, &blocks[i]));
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
        const transform_header header = { kvant_transform_kind(tensor, id), 0 };
        memcpy(at, &header, sizeof header);
        kvant_transform_export(tensor, id, 0, at + sizeof header);
        at += sizeof header + kvant_transform_bytes(tensor, header.kind);
    }
    return at;
}

static kvant_status export_block(const kvant_tensor *tensor, const kvant_block_slots *from,
                                 const int32_t number[KVANT_MAX_TRANSFORMS], uint8_t **to)
{
    const kvant_block *b = &tensor->blocks[from->block];
    const uint64_t age = b->open_page >= 0 ? kvant_block_age(tensor, from->block) : 0;
    const block_header header = { b->written & from->slots, form_of(tensor, from),
                                  (uint32_t)number[b->transform_id], b->position,
                                  age < UINT32_MAX ? (uint32_t)age : UINT32_MAX };
    uint8_t *at = *to;
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    *to = at + body_bytes(tensor, header.form);
    if (header.form & SHIFTED) {
        kvant_shifts_export(tensor, from->block, from->slots, at);
        at += kvant_shifts_export_bytes(tensor);
    }
    return kvant_slots_read(tensor, from->block, from->slots, at);
}

kvant_status kvant_tensor_export_record(const kvant_tensor *tensor, const kvant_block_slots *blocks,
                                        uint32_t n, void *data, size_t bytes)
{
    int32_t number[KVANT_MAX_TRANSFORMS];
    size_t needed;
    uint8_t *at = data;
    KVANT_FORWARD(kvant_tensor_record_size(tensor, blocks, n, &needed));
    KVANT_RETURN_IF(!data || bytes != needed, KVANT_ERR_ARGUMENT);
    const record_header header = { RECORD_MAGIC, bytes, kvant_tensor_scheme(tensor), n,
                                   number_transforms(tensor, blocks, n, number) };
    memcpy(at, &header, sizeof header);
    at = export_transforms(tensor, number, header.n_transforms, at + sizeof header);
    for (uint32_t i = 0; i < n; i++)
        KVANT_FORWARD(export_block(tensor, &blocks[i], number, &at));
    const uint64_t checksum = kvant_fnv1a_words(KVANT_FNV_START, data, bytes - sizeof checksum);
    memcpy(at, &checksum, sizeof checksum);
    return KVANT_OK;
}

/* Importing. Nothing changes in the tensor until everything was checked. */

/* A record whose sizes were checked. */
typedef struct record {
    const uint8_t *transforms[KVANT_MAX_TRANSFORMS]; /* their headers */
    uint32_t n_transforms;
    const uint8_t *blocks; /* the first block's header */
} record;

static bool take(const uint8_t **at, size_t *left, size_t bytes)
{
    if (*left < bytes)
        return false;
    *at += bytes;
    *left -= bytes;
    return true;
}

static kvant_status read_transforms(const kvant_tensor *tensor, const uint8_t **at, size_t *left,
                                    record *r)
{
    for (uint32_t i = 0; i < r->n_transforms; i++) {
        transform_header header;
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

/* used: the ids of shifts that the tensor and the record need so far. */
static kvant_status check_shifts(kvant_tensor *tensor, const block_header *header,
                                 const uint8_t *body, uint32_t *used)
{
    uint8_t ids[KVANT_PAGE_TOKENS];
    if (!(header->form & SHIFTED))
        return KVANT_OK;
    if (tensor->device || kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V)
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "exported block: its keys were shifted, which only keys in the "
                          "computer's memory support");
    return kvant_shifts_read(tensor, header->written, body, used, ids);
}

static kvant_status check_blocks(kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n,
                                 const uint8_t *at, size_t left, const record *r)
{
    uint32_t used = 0;
    for (uint32_t i = 0; i < n; i++) {
        block_header header;
        const uint8_t *from = at;
        if (!take(&at, &left, sizeof header))
            return kvant_damaged("it is cut short");
        memcpy(&header, from, sizeof header);
        const uint8_t *body = at;
        if (header.form > (OPEN_PAGES | SHIFTED) || header.transform >= r->n_transforms ||
            header.written != blocks[i].slots || !header.written)
            return kvant_damaged("a block has other slots than its record says");
        if (!take(&at, &left, body_bytes(tensor, header.form)))
            return kvant_damaged("it is cut short");
        KVANT_FORWARD(check_shifts(tensor, &header, body, &used));
        body += header.form & SHIFTED ? kvant_shifts_export_bytes(tensor) : 0;
        if (header.form & OPEN_PAGES)
            KVANT_FORWARD(kvant_open_rows_check(tensor, body));
        KVANT_RETURN_IF(header.form & OPEN_PAGES &&
                            !kvant_block_finds_page(tensor, blocks[i].block),
                        kvant_no_page());
    }
    return left ? kvant_damaged("its size does not match its head") : KVANT_OK;
}

static kvant_status check_record(kvant_tensor *tensor, const kvant_block_slots *blocks, uint32_t n,
                                 const uint8_t *data, size_t bytes, record *r)
{
    record_header header;
    uint64_t checksum;
    if (bytes < sizeof header + sizeof checksum || bytes % sizeof checksum)
        return kvant_damaged("it is cut short");
    memcpy(&header, data, sizeof header);
    if (header.magic != RECORD_MAGIC || header.n_transforms > KVANT_MAX_TRANSFORMS)
        return kvant_damaged("not a record, or of another version of kvant");
    if (header.scheme != kvant_tensor_scheme(tensor))
        return kvant_damaged(
            "it was made with other codecs, another shape of heads or another seed");
    if (header.bytes != bytes || header.n_blocks != n)
        return kvant_damaged("its size does not match its head");
    memcpy(&checksum, data + bytes - sizeof checksum, sizeof checksum);
    if (checksum != kvant_fnv1a_words(KVANT_FNV_START, data, bytes - sizeof checksum))
        return kvant_damaged("its checksum does not match");
    const uint8_t *at = data + sizeof header;
    size_t left = bytes - sizeof header - sizeof checksum;
    r->n_transforms = header.n_transforms;
    KVANT_FORWARD(read_transforms(tensor, &at, &left, r));
    r->blocks = at;
    return check_blocks(tensor, blocks, n, at, left, r);
}

/* Finds or makes all transforms of a record. Each one counts as used until all are found. */
static kvant_status import_transforms(kvant_tensor *tensor, const record *r,
                                      uint32_t ids[KVANT_MAX_TRANSFORMS])
{
    kvant_status status = KVANT_OK;
    uint32_t n = 0;
    for (; n < r->n_transforms && status == KVANT_OK; n++) {
        transform_header header;
        memcpy(&header, r->transforms[n], sizeof header);
        status =
            kvant_transform_import(tensor, r->transforms[n] + sizeof header, header.kind, &ids[n]);
        if (status == KVANT_OK)
            tensor->transforms[ids[n]].n_blocks++;
    }
    for (uint32_t i = 0; i < n; i++)
        if (i + 1 < n || status == KVANT_OK)
            tensor->transforms[ids[i]].n_blocks--;
    return status;
}

/* Cannot fail after check_shifts: clearing blocks frees ids, and the memory is there. */
static kvant_status import_shifts(kvant_tensor *tensor, uint32_t block, const block_header *header,
                                  const uint8_t *body)
{
    uint8_t ids[KVANT_PAGE_TOKENS];
    uint32_t used = 0;
    if (!(header->form & SHIFTED))
        return KVANT_OK;
    KVANT_FORWARD(kvant_shifts_read(tensor, header->written, body, &used, ids));
    kvant_shifts_set_block(tensor, block, ids);
    return KVANT_OK;
}

static kvant_status import_block(kvant_tensor *tensor, uint32_t block, const uint32_t *ids,
                                 const uint8_t **from)
{
    block_header header;
    memcpy(&header, *from, sizeof header);
    const uint8_t *body = *from + sizeof header,
                  *pages = body + (header.form & SHIFTED ? kvant_shifts_export_bytes(tensor) : 0);
    const bool open = header.form & OPEN_PAGES;
    const uint32_t id = ids[header.transform];
    *from = body + body_bytes(tensor, header.form);
    /* Rows that are pending for a first transform lie in the tensor's own pages. */
    const bool exact = open && (tensor->transforms[id].learned || !tensor->learns) &&
                       kvant_exact_store(tensor, block, 0, NULL);
    const int32_t page =
        open && !exact ? kvant_block_acquire(tensor, block, header.age) : KVANT_NO_PAGE;
    if (page >= 0) {
        tensor->open_pages[page].dirty = header.written;
        kvant_pages_copy(tensor, kvant_open_page_of(tensor, page, 0), pages,
                         kvant_open_block_bytes(tensor));
    }
    kvant_block_fill(tensor, block, id, header.position, header.written, open ? NULL : pages);
    if (tensor->transforms[id].learned) /* for the next block of the sequence */
        tensor->sequence_transforms[tensor->blocks[block].sequence] = (uint8_t)id;
    if (exact)
        tensor->blocks[block].resident = kvant_exact_store(tensor, block, header.written, pages);
    return import_shifts(tensor, block, &header, body);
}

/* The transform of the last block that has a learned one serves new rows. */
static void begin_transforms(kvant_tensor *tensor, const record *r, const uint32_t *ids)
{
    for (uint32_t i = r->n_transforms; i > 0 && kvant_transforms_pending(tensor); i--)
        if (tensor->transforms[ids[i - 1]].learned)
            kvant_transforms_begin(tensor, ids[i - 1]);
}

kvant_status kvant_tensor_import_record(kvant_tensor *tensor, const kvant_block_slots *blocks,
                                        uint32_t n, const void *data, size_t bytes)
{
    uint32_t ids[KVANT_MAX_TRANSFORMS];
    record r = { .n_transforms = 0 };
    kvant_status status = KVANT_OK;
    KVANT_RETURN_IF(!tensor || !blocks || !data || !are_valid(tensor, blocks, n),
                    KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_record(tensor, blocks, n, data, bytes, &r));
    KVANT_FORWARD(import_transforms(tensor, &r, ids));
    begin_transforms(tensor, &r, ids);
    for (uint32_t i = 0; i < n; i++)
        kvant_block_clear(tensor, blocks[i].block);
    for (uint32_t i = 0; i < n && status == KVANT_OK; i++)
        status = import_block(tensor, blocks[i].block, ids, &r.blocks);
    return status == KVANT_OK ? kvant_pages_status(tensor) : status;
}
