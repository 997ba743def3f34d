/* record.h - the heads in a record (format.md, "Records") and the sizes of its blocks, for the
 * files that write and read records. */
#pragma once

#include "shift.h"

#define KVANT_RECORD_MAGIC 0x324345524e564bffu /* 0xff, then "KVNREC2" */

typedef struct kvant_record_header {
    uint64_t magic;
    uint64_t bytes;  /* of the whole record */
    uint64_t scheme; /* kvant_tensor_scheme */
    uint32_t n_blocks, n_transforms;
} kvant_record_header;
_Static_assert(sizeof(kvant_record_header) == 32, "format.md");

/* Before the bytes of a transform. */
typedef struct kvant_record_transform {
    uint32_t kind, zero;
} kvant_record_transform;

/* Before the shifts and the pages of a block. */
typedef struct kvant_record_block {
    uint64_t written;
    uint64_t coded;     /* slots of open pages whose codes follow, too */
    uint32_t form;      /* bits: the pages are open; slots have shifts */
    uint32_t transform; /* its place in the record */
    int32_t position;   /* KVANT_NO_POSITION: not known */
    uint32_t age;       /* of an open block: rows of its sequence that were written later */
} kvant_record_block;
_Static_assert(sizeof(kvant_record_block) == 32, "format.md");

enum { KVANT_OPEN_PAGES = 1, KVANT_SHIFTED = 2 };

static inline size_t kvant_record_shift_bytes(const kvant_tensor *tensor,
                                              const kvant_record_block *header)
{
    return header->form & KVANT_SHIFTED ? kvant_shifts_export_bytes(tensor) : 0;
}

static inline size_t kvant_record_open_bytes(const kvant_tensor *tensor,
                                             const kvant_record_block *header)
{
    return header->form & KVANT_OPEN_PAGES ? kvant_open_block_bytes(tensor) : 0;
}

static inline bool kvant_record_has_codes(const kvant_record_block *header)
{
    return !(header->form & KVANT_OPEN_PAGES) || header->coded;
}

static inline size_t kvant_record_body_bytes(const kvant_tensor *tensor,
                                             const kvant_record_block *header)
{
    return kvant_record_shift_bytes(tensor, header) + kvant_record_open_bytes(tensor, header) +
           (kvant_record_has_codes(header) ? tensor->block_bytes : 0);
}
