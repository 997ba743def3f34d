/* record_outer.c - records of blocks whose pages lie elsewhere, for example on a GPU of the
 * llama.cpp plug-in. The caller copies the pages; this file writes everything else. record.c
 * checks and reads the records like any others. */
#include <string.h>

#include <kvant/tensor_hooks.h>

#include "../base/error.h"
#include "../base/fnv.h"
#include "../base/half.h"
#include "center.h"
#include "record.h"
#include "transform_bytes.h"

/* Transforms */

size_t kvant_tensor_transform_size(const kvant_tensor *tensor)
{
    return tensor
               ? sizeof(kvant_record_transform) + kvant_transform_bytes(tensor, KVANT_BYTES_CENTERS)
               : 0;
}

static size_t export_transform(const kvant_tensor *tensor, uint32_t transform_id, void *bytes)
{
    const kvant_record_transform header = { kvant_transform_kind(tensor, transform_id), 0 };
    memcpy(bytes, &header, sizeof header);
    kvant_transform_export(tensor, transform_id, (uint8_t *)bytes + sizeof header);
    return sizeof header + kvant_transform_bytes(tensor, header.kind);
}

kvant_status kvant_tensor_get_transform(const kvant_tensor *tensor, uint32_t block, void *bytes,
                                        size_t *used)
{
    KVANT_RETURN_IF(!tensor || !bytes || !used || block >= tensor->n_blocks, KVANT_ERR_ARGUMENT);
    *used = export_transform(tensor, tensor->blocks[block].transform_id, bytes);
    return KVANT_OK;
}

kvant_status kvant_tensor_center_rope(const kvant_tensor *tensor, uint32_t block, uint32_t *n_dims,
                                      uint32_t *interleaved, float *frequencies)
{
    KVANT_RETURN_IF(!tensor || block >= tensor->n_blocks || !n_dims || !interleaved || !frequencies,
                    KVANT_ERR_ARGUMENT);
    const kvant_centers *centers =
        kvant_tensor_transform_centers(tensor, tensor->blocks[block].transform_id);
    KVANT_RETURN_IF(!centers, KVANT_ERR_UNSUPPORTED);
    const kvant_rope rope = kvant_centers_rope(centers, frequencies);
    *n_dims = rope.n_dims;
    *interleaved = rope.interleaved;
    return KVANT_OK;
}

size_t kvant_tensor_affine_transform(const kvant_tensor *tensor, const float *center,
                                     const float *scale, void *bytes)
{
    const size_t width = kvant_tensor_width(tensor);
    const kvant_record_transform header = { center || scale ? KVANT_BYTES_AFFINE
                                                            : KVANT_BYTES_NOTHING,
                                            0 };
    float *to = (float *)(void *)((uint8_t *)bytes + sizeof header);
    memcpy(bytes, &header, sizeof header);
    for (size_t i = 0; i < width && header.kind; i++) {
        to[i] = center ? center[i] : 0;
        to[width + i] = scale ? scale[i] : 1;
    }
    return sizeof header + kvant_transform_bytes(tensor, header.kind);
}

size_t kvant_tensor_half_transform(const kvant_tensor *tensor, const float *center,
                                   const float *scale, void *bytes)
{
    const size_t width = kvant_tensor_width(tensor);
    const kvant_record_transform header = { KVANT_BYTES_HALVES, 0 };
    uint16_t *to = (uint16_t *)(void *)((uint8_t *)bytes + sizeof header);
    memcpy(bytes, &header, sizeof header);
    for (size_t i = 0; i < width; i++) {
        to[i] = kvant_half_from_float(center ? center[i] : 0);
        to[width + i] = kvant_half_from_float(scale ? scale[i] : 1);
    }
    return sizeof header + kvant_transform_bytes(tensor, header.kind);
}

size_t kvant_tensor_matrix_transform(const kvant_tensor *tensor,
                                     const kvant_matrix_numbers *numbers, void *bytes)
{
    const kvant_record_transform header = { numbers->start ? KVANT_BYTES_CENTERS
                                                           : KVANT_BYTES_MATRICES,
                                            0 };
    memcpy(bytes, &header, sizeof header);
    kvant_transform_bytes_of(tensor, numbers, (uint8_t *)bytes + sizeof header);
    return sizeof header + kvant_transform_bytes(tensor, header.kind);
}

/* Writing */

static size_t transform_bytes(const kvant_tensor *tensor, const void *transform)
{
    kvant_record_transform header;
    memcpy(&header, transform, sizeof header);
    return sizeof header + kvant_transform_bytes(tensor, header.kind);
}

static kvant_record_block header_of(const kvant_tensor *tensor, const kvant_outer_block *b)
{
    const uint64_t coded = b->exact ? b->slots & ~b->dirty : 0;
    return (kvant_record_block){
        .written = b->slots,
        .coded = kvant_slots_share_scales(tensor, b->written, coded) ? 0 : coded,
        .form = (b->exact ? KVANT_OPEN_PAGES : 0) | (b->shift ? KVANT_SHIFTED : 0),
        .transform = b->transform,
        .position = b->position,
        .age = b->exact ? b->age : 0
    };
}

/* Rows that share their scales with rows of other slots would have to be decoded. */
static bool accepts(const kvant_tensor *tensor, const kvant_outer_record *r)
{
    for (uint32_t i = 0; i < r->n_blocks; i++) {
        const kvant_outer_block *b = &r->blocks[i];
        if (!b->exact && kvant_slots_share_scales(tensor, b->written, b->slots))
            return false;
    }
    return true;
}

kvant_status kvant_tensor_outer_size(const kvant_tensor *tensor, const kvant_outer_record *record,
                                     size_t *bytes)
{
    KVANT_RETURN_IF(!tensor || !record || !bytes, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!accepts(tensor, record), KVANT_ERR_UNSUPPORTED);
    *bytes = sizeof(kvant_record_header) + sizeof(uint64_t);
    for (uint32_t i = 0; i < record->n_transforms; i++)
        *bytes += transform_bytes(tensor, record->transforms[i]);
    for (uint32_t i = 0; i < record->n_blocks; i++) {
        const kvant_record_block header = header_of(tensor, &record->blocks[i]);
        *bytes += sizeof header + kvant_record_body_bytes(tensor, &header);
    }
    return KVANT_OK;
}

static void write_shift(const kvant_tensor *tensor, const kvant_outer_block *b,
                        const kvant_rope *rope, uint8_t *to)
{
    int32_t by[KVANT_PAGE_TOKENS];
    for (uint32_t slot = 0; slot < KVANT_PAGE_TOKENS; slot++)
        by[slot] = b->slots >> slot & 1 ? b->shift : 0;
    kvant_shifts_write(tensor, rope, by, to);
}

/* Writes the head of a block and says where its pages go. Returns the end of the block. */
static uint8_t *begin_block(const kvant_tensor *tensor, kvant_outer_block *b,
                            const kvant_rope *rope, uint8_t *at)
{
    const kvant_record_block header = header_of(tensor, b);
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    if (b->shift)
        write_shift(tensor, b, rope, at);
    at += kvant_record_shift_bytes(tensor, &header);
    b->rows = b->exact ? at : NULL;
    at += kvant_record_open_bytes(tensor, &header);
    b->codes = kvant_record_has_codes(&header) ? at : NULL;
    return b->codes ? at + tensor->block_bytes : at;
}

kvant_status kvant_tensor_outer_begin(const kvant_tensor *tensor, const kvant_outer_record *record,
                                      void *data, size_t bytes)
{
    uint8_t *at = data;
    size_t needed;
    KVANT_FORWARD(kvant_tensor_outer_size(tensor, record, &needed));
    KVANT_RETURN_IF(!data || bytes != needed, KVANT_ERR_ARGUMENT);
    const kvant_record_header header = { KVANT_RECORD_MAGIC, bytes, kvant_tensor_scheme(tensor),
                                         record->n_blocks, record->n_transforms };
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    for (uint32_t i = 0; i < record->n_transforms; i++) {
        const size_t n = transform_bytes(tensor, record->transforms[i]);
        memcpy(at, record->transforms[i], n);
        at += n;
    }
    for (uint32_t i = 0; i < record->n_blocks; i++)
        at = begin_block(tensor, &record->blocks[i], record->rope, at);
    return KVANT_OK;
}

kvant_status kvant_tensor_outer_end(const kvant_tensor *tensor, const kvant_outer_record *record,
                                    void *data, size_t bytes)
{
    for (uint32_t i = 0; i < record->n_blocks; i++) {
        const kvant_outer_block *b = &record->blocks[i];
        if (b->rows)
            kvant_slots_erase_rows(tensor, b->slots, b->rows);
        if (b->codes)
            KVANT_FORWARD(kvant_slots_erase_codes(
                tensor, b->exact ? b->slots & ~b->dirty : b->slots, b->codes));
    }
    const uint64_t checksum = kvant_checksum_of(data, bytes - sizeof checksum);
    memcpy((uint8_t *)data + bytes - sizeof checksum, &checksum, sizeof checksum);
    return KVANT_OK;
}

/* Reading */

/* The shift of all slots, or KVANT_ANY_SHIFT if they differ. */
static int32_t shift_of(const kvant_tensor *tensor, uint64_t slots, const uint8_t *shifts)
{
    int32_t by[KVANT_PAGE_TOKENS], common = 0;
    uint32_t first = 0;
    kvant_shifts_distances(tensor, shifts, by);
    while (first < KVANT_PAGE_TOKENS && !(slots >> first & 1))
        first++;
    common = first < KVANT_PAGE_TOKENS ? by[first] : 0;
    for (uint32_t slot = first; slot < KVANT_PAGE_TOKENS; slot++)
        if (slots >> slot & 1 && by[slot] != common)
            return KVANT_ANY_SHIFT;
    return common;
}

/* Describes a block that was checked. Returns its end. */
static const uint8_t *read_block(const kvant_tensor *tensor, const kvant_record *r,
                                 const uint8_t *at, kvant_outer_block *b)
{
    kvant_record_block header;
    kvant_record_transform transform;
    memcpy(&header, at, sizeof header);
    memcpy(&transform, r->transforms[header.transform], sizeof transform);
    at += sizeof header;
    const uint8_t *pages = at + kvant_record_shift_bytes(tensor, &header),
                  *codes = pages + kvant_record_open_bytes(tensor, &header);
    const bool exact = header.form & KVANT_OPEN_PAGES;
    *b = (kvant_outer_block){
        .slots = header.written,
        .written = header.written,
        .dirty = exact ? header.written & ~header.coded : 0,
        .transform = header.transform,
        .age = header.age,
        .position = header.position,
        .shift = header.form & KVANT_SHIFTED ? shift_of(tensor, header.written, at) : 0,
        .exact = exact,
        .has_matrix = kvant_bytes_have_matrices(transform.kind),
        .has_centers = transform.kind == KVANT_BYTES_CENTERS,
        .rows = exact ? (void *)(uintptr_t)pages : NULL,
        .codes = kvant_record_has_codes(&header) ? (void *)(uintptr_t)codes : NULL
    };
    return b->codes ? codes + tensor->block_bytes : codes;
}

kvant_status kvant_tensor_read_outer(kvant_tensor *tensor, const kvant_block_slots *slots,
                                     uint32_t n, const void *data, size_t bytes, int is_checked,
                                     kvant_outer_block *blocks,
                                     const void *transforms[KVANT_MAX_TRANSFORMS])
{
    kvant_record r = { .is_checked = is_checked != 0, .elsewhere = true };
    KVANT_RETURN_IF(!blocks || !transforms, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_record_check(tensor, slots, n, data, bytes, &r));
    const uint8_t *at = r.blocks;
    for (uint32_t i = 0; i < n; i++)
        at = read_block(tensor, &r, at, &blocks[i]);
    for (uint32_t i = 0; i < r.n_transforms; i++)
        transforms[i] = r.transforms[i];
    return KVANT_OK;
}

size_t kvant_tensor_transform_bytes(const kvant_tensor *tensor, const void *transform)
{
    return tensor && transform ? transform_bytes(tensor, transform) : 0;
}

kvant_status kvant_tensor_set_transform(kvant_tensor *tensor, uint32_t block, const void *transform,
                                        uint32_t n_threads)
{
    kvant_record_transform header;
    uint32_t id;
    KVANT_RETURN_IF(!tensor || !transform || block >= tensor->n_blocks ||
                        tensor->blocks[block].written,
                    KVANT_ERR_ARGUMENT);
    memcpy(&header, transform, sizeof header);
    if (header.kind >= KVANT_BYTES_KINDS || header.zero)
        return kvant_damaged("a transform is of another version of kvant");
    KVANT_FORWARD(kvant_transform_accepts(tensor, header.kind));
    if (tensor->blocks[block].transform_id) /* a block without rows counts with another one only */
        kvant_transforms_leave(tensor, block);
    KVANT_FORWARD(kvant_transform_import(tensor, (const uint8_t *)transform + sizeof header,
                                         header.kind, n_threads, &id));
    if (id)
        kvant_transforms_join(tensor, block, id);
    return KVANT_OK;
}
