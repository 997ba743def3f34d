/* transfer.c - moves blocks: copies between tensors, export and import (format.md,
 * "Blocks"). */
#include <string.h>

#include "../base/abi.h"
#include "../base/error.h"
#include "../base/fnv.h"
#include "shift.h"
#include "transform_bytes.h"
#include "transforms.h"

/* Copies */

static bool same_codecs(const kvant_tensor *a, const kvant_tensor *b)
{
    return a->n_kv_heads == b->n_kv_heads &&
           memcmp(a->codecs, b->codecs, a->n_kv_heads * sizeof *a->codecs) == 0;
}

kvant_status kvant_no_page(void)
{
    return kvant_fail(NULL, KVANT_ERR_FULL,
                      "the tensor has no free exact pages: set a larger n_open_blocks");
}

/* Finds or makes the target's transforms for the transforms that the source's blocks use. */
static kvant_status map_transforms(const kvant_tensor *from, uint32_t first, uint32_t n,
                                   kvant_tensor *to, int32_t map[KVANT_MAX_TRANSFORMS])
{
    kvant_status status = KVANT_OK;
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++)
        map[v] = -1;
    for (uint32_t block = first; block < first + n && status == KVANT_OK; block++) {
        uint32_t v = from->blocks[block].transform_id;
        const kvant_tensor_transform *transform = &from->transforms[v];
        if (!from->blocks[block].written || map[v] >= 0)
            continue;
        uint32_t found = v;
        const kvant_key_transform *key_transform = transform->key_transform;
        const kvant_transform_values numbers = { transform->center, transform->scale,
                                                 key_transform ? key_transform->triangles : NULL,
                                                 key_transform ? key_transform->centers : NULL,
                                                 transform->learned };
        if (from != to)
            status = kvant_transforms_find(to, &numbers, &found);
        if (status != KVANT_OK)
            continue;
        map[v] = (int32_t)found;
        to->transforms[found].n_blocks++; /* keeps it in use until all are found */
    }
    for (uint32_t v = 0; v < KVANT_MAX_TRANSFORMS; v++)
        if (map[v] >= 0)
            to->transforms[map[v]].n_blocks--;
    return status == KVANT_ERR_FULL ? kvant_no_transform() : status;
}

/* Puts the first learned transform into force when copied blocks bring one. */
static void begin_transforms(const kvant_tensor *from, kvant_tensor *to,
                             const int32_t map[KVANT_MAX_TRANSFORMS])
{
    for (uint32_t i = 0; i < KVANT_MAX_TRANSFORMS; i++) {
        uint32_t v = (from->newest + i) % KVANT_MAX_TRANSFORMS;
        if (map[v] >= 0 && from->transforms[v].learned && kvant_transforms_pending(to))
            kvant_transforms_begin(to, (uint32_t)map[v]);
    }
}

static uint32_t count_free_pages(const kvant_tensor *tensor)
{
    uint32_t n = 0;
    for (uint32_t i = 0; i < tensor->n_open_pages; i++)
        n += tensor->open_pages[i].block < 0;
    return n;
}

/* Whether there are pages for blocks that are not sinks. Then an open block always finds a page,
 * because another block is sealed for it. Without such pages only a sink that has a page or finds a
 * free one may be open. */
static bool has_pool(const kvant_tensor *tensor)
{
    return tensor->n_open_pages > tensor->n_sink_pages;
}

/* Whether every open block of the source finds an open page. */
static bool finds_pages(const kvant_tensor *from, uint32_t first, uint32_t n,
                        const kvant_tensor *to, uint32_t to_first)
{
    uint32_t needed = 0, there = count_free_pages(to);
    for (uint32_t i = 0; i < n && !has_pool(to); i++) {
        const bool open = from->blocks[first + i].open_page >= 0;
        if (open && !kvant_is_sink(to, to_first + i))
            return false;
        needed += open;
        there += to->blocks[to_first + i].open_page >= 0;
    }
    return needed <= there;
}

bool kvant_block_finds_page(const kvant_tensor *tensor, uint32_t block)
{
    return has_pool(tensor) || tensor->blocks[block].open_page >= 0 ||
           (kvant_is_sink(tensor, block) && count_free_pages(tensor) > 0);
}

uint64_t kvant_block_age(const kvant_tensor *tensor, uint32_t block)
{
    const int64_t age = tensor->plan ? kvant_plan_age(tensor->plan, block) : 0;
    return age > 0 ? (uint64_t)age : 0;
}

int32_t kvant_block_acquire(kvant_tensor *tensor, uint32_t block, uint64_t age)
{
    uint64_t *clock = &tensor->clocks[tensor->blocks[block].sequence];
    *clock = *clock < age ? age : *clock;
    return kvant_open_acquire(tensor, block, age, 1);
}

static void copy_open(const kvant_tensor *from, uint32_t source, kvant_tensor *to, int32_t page)
{
    const kvant_open_page *open = &from->open_pages[from->blocks[source].open_page];
    to->open_pages[page].dirty = open->dirty;
    kvant_pages_copy(to, kvant_open_page_of(to, page, 0),
                     kvant_open_page_of(from, from->blocks[source].open_page, 0),
                     kvant_open_block_bytes(from));
}

void kvant_block_fill(kvant_tensor *tensor, uint32_t block, uint32_t transform, int32_t position,
                      uint64_t written, const void *sealed)
{
    kvant_block *b = &tensor->blocks[block];
    kvant_transforms_join(tensor, block, transform);
    b->position = position;
    b->written = written;
    b->resident = sealed != NULL;
    b->state = b->open_page < 0 ? KVANT_BLOCK_SEALED : b->state;
    tensor->any_written = true;
    if (sealed)
        kvant_pages_copy(tensor, kvant_sealed_page(tensor, block, 0), sealed, tensor->block_bytes);
}

static void copy_block(const kvant_tensor *from, uint32_t source, kvant_tensor *to, uint32_t target,
                       uint32_t transform)
{
    const kvant_block *block = &from->blocks[source];
    if (!block->written)
        return;
    /* If both blocks are in one tensor, taking a page may seal the source. */
    int32_t page = block->open_page >= 0
                       ? kvant_block_acquire(to, target, kvant_block_age(from, source))
                       : KVANT_NO_PAGE;
    if (page >= 0 && block->open_page >= 0)
        copy_open(from, source, to, page);
    else if (page >= 0)
        kvant_open_leave(to, target, false);
    kvant_block_fill(to, target, transform, block->position, block->written,
                     block->resident ? kvant_sealed_page(from, source, 0) : NULL);
    const void *exact = kvant_exact_page(from, source);
    if (exact)
        kvant_exact_store(to, target, 0, exact);
}

static bool in_range(const kvant_tensor *tensor, uint32_t first, uint32_t n)
{
    return first <= tensor->n_blocks && n <= tensor->n_blocks - first;
}

kvant_status kvant_tensor_copy(const kvant_tensor *from, uint32_t first, kvant_tensor *to,
                               uint32_t to_first, uint32_t n)
{
    int32_t map[KVANT_MAX_TRANSFORMS];
    uint8_t shifts[KVANT_MOST_SHIFTS];
    KVANT_RETURN_IF(!from || !to || from->device != to->device || !same_codecs(from, to) ||
                        !in_range(from, first, n) || !in_range(to, to_first, n),
                    KVANT_ERR_ARGUMENT);
    if (from == to && first == to_first)
        return KVANT_OK;
    KVANT_RETURN_IF(from == to && first < to_first + n && to_first < first + n, KVANT_ERR_ARGUMENT);
    KVANT_RETURN_IF(!finds_pages(from, first, n, to, to_first), kvant_no_page());
    if (from->recent.n)
        KVANT_FORWARD(kvant_transforms_reserve(to));
    KVANT_FORWARD(kvant_shifts_map(from, first, n, to, shifts));
    KVANT_FORWARD(map_transforms(from, first, n, to, map));
    begin_transforms(from, to, map);
    kvant_transforms_share(from, to);
    for (uint32_t i = 0; i < n; i++)
        kvant_block_clear(to, to_first + i);
    for (uint32_t i = 0; i < n; i++) {
        copy_block(from, first + i, to, to_first + i,
                   (uint32_t)map[from->blocks[first + i].transform_id]);
        kvant_shifts_copy_block(from, first + i, to, to_first + i, shifts);
    }
    return kvant_pages_status(to);
}

/* Export and import */

#define BLOCK_MAGIC 0x314b4c42544e564bu /* "KVNTBLK1" */

typedef struct block_header {
    uint64_t magic;
    uint64_t bytes;  /* of the whole exported block */
    uint64_t scheme; /* a hash of the codecs (kvant_tensor_scheme) */
    uint64_t written;
    uint32_t open; /* bits: the block has fp16 pages, not sealed ones; its slots have shifts */
    /* 0: no transform. 1: centre and scale of all kv heads follow. 2: also matrices. 3: also
     * centres of blocks. */
    uint32_t learned;
} block_header;
_Static_assert(sizeof(block_header) == 40, "format.md");

static size_t page_bytes(const kvant_tensor *tensor, bool open)
{
    return open ? kvant_open_block_bytes(tensor) : tensor->block_bytes;
}

enum { OPEN_PAGES = 1, SHIFTED = 2 };

static size_t bytes_of(const kvant_tensor *tensor, uint32_t open, uint32_t learned)
{
    return sizeof(block_header) + kvant_transform_bytes(tensor, learned) +
           (open & SHIFTED ? kvant_shifts_export_bytes(tensor) : 0) +
           page_bytes(tensor, open & OPEN_PAGES) + sizeof(uint64_t);
}

size_t kvant_tensor_export_size(const kvant_tensor *tensor)
{
    if (!tensor)
        return 0;
    const uint32_t learned = tensor->learning ? KVANT_BYTES_CENTERS : KVANT_BYTES_AFFINE;
    const uint32_t shifted = kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_K ? SHIFTED : 0;
    size_t open = tensor->n_open_pages || kvant_exact_store(tensor, 0, 0, NULL)
                      ? bytes_of(tensor, OPEN_PAGES | shifted, learned)
                      : 0,
           sealed = bytes_of(tensor, shifted, learned);
    return open > sealed ? open : sealed;
}

kvant_status kvant_tensor_export(const kvant_tensor *tensor, uint32_t block, void *data,
                                 size_t bytes, size_t *used)
{
    return kvant_block_export(tensor, block, UINT64_MAX, data, bytes, used);
}

kvant_status kvant_block_export(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                                void *data, size_t bytes, size_t *used)
{
    KVANT_RETURN_IF(!tensor || block >= tensor->n_blocks || !data || !used, KVANT_ERR_ARGUMENT);
    const kvant_block *b = &tensor->blocks[block];
    const bool open = kvant_slots_as_open(tensor, block, slots),
               shifted = kvant_shifts_any(tensor, block, slots);
    const uint32_t learned = kvant_transform_kind(tensor, b->transform_id),
                   kind = (open ? OPEN_PAGES : 0) | (shifted ? SHIFTED : 0);
    const block_header header = { BLOCK_MAGIC,
                                  bytes_of(tensor, kind, learned),
                                  kvant_tensor_scheme(tensor),
                                  b->written & slots,
                                  kind,
                                  learned };
    uint8_t *at = data;
    KVANT_RETURN_IF(bytes < header.bytes, KVANT_ERR_ARGUMENT);
    memcpy(at, &header, sizeof header);
    at += sizeof header;
    kvant_transform_export(tensor, b->transform_id, b->position, at);
    at += kvant_transform_bytes(tensor, learned);
    if (shifted) {
        kvant_shifts_export(tensor, block, slots, at);
        at += kvant_shifts_export_bytes(tensor);
    }
    KVANT_FORWARD(kvant_slots_read(tensor, block, slots, at));
    at += page_bytes(tensor, open);
    uint64_t checksum = kvant_fnv1a(KVANT_FNV_START, data, (size_t)(at - (uint8_t *)data));
    memcpy(at, &checksum, sizeof checksum);
    *used = header.bytes;
    return KVANT_OK;
}

static kvant_status check_block(const kvant_tensor *tensor, const uint8_t *data, size_t bytes,
                                block_header *header)
{
    uint64_t checksum;
    if (bytes < sizeof *header + sizeof checksum)
        return kvant_damaged("it is cut short");
    memcpy(header, data, sizeof *header);
    if (header->magic != BLOCK_MAGIC || header->open > (OPEN_PAGES | SHIFTED) ||
        header->learned > KVANT_BYTES_CENTERS)
        return kvant_damaged("not a block, or of another version of kvant: export the block again");
    if (header->scheme != kvant_tensor_scheme(tensor))
        return kvant_damaged(
            "it was made with other codecs, another shape of heads or another seed");
    KVANT_FORWARD(kvant_transform_accepts(tensor, header->learned));
    if (header->open & SHIFTED &&
        (tensor->device || kvant_tensor_codec_info(tensor)->role == KVANT_ROLE_V))
        return kvant_fail(NULL, KVANT_ERR_UNSUPPORTED,
                          "exported block: its keys were shifted, which only keys in the "
                          "computer's memory support");
    if (header->bytes != bytes || bytes != bytes_of(tensor, header->open, header->learned))
        return kvant_damaged("its size does not match its head");
    memcpy(&checksum, data + bytes - sizeof checksum, sizeof checksum);
    if (checksum != kvant_fnv1a(KVANT_FNV_START, data, bytes - sizeof checksum))
        return kvant_damaged("its checksum does not match");
    return KVANT_OK;
}

kvant_status kvant_open_rows_check(const kvant_tensor *tensor, const uint8_t *pages)
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

kvant_status kvant_tensor_import(kvant_tensor *tensor, uint32_t block, const void *data,
                                 size_t bytes)
{
    block_header header;
    uint32_t transform;
    uint8_t shifts[KVANT_PAGE_TOKENS];
    uint32_t used = 0;
    int32_t page = KVANT_NO_PAGE;
    KVANT_RETURN_IF(!tensor || block >= tensor->n_blocks || !data, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_block(tensor, data, bytes, &header));
    const bool open = header.open & OPEN_PAGES, shifted = header.open & SHIFTED;
    const uint8_t *numbers = (const uint8_t *)data + sizeof header,
                  *moved = numbers + kvant_transform_bytes(tensor, header.learned);
    const uint8_t *pages = moved + (shifted ? kvant_shifts_export_bytes(tensor) : 0);
    if (open)
        KVANT_FORWARD(kvant_open_rows_check(tensor, pages));
    /* Rows that are pending for a first transform lie in the tensor's own pages. */
    const bool exact =
        open && (header.learned || !tensor->learns) && kvant_exact_store(tensor, block, 0, NULL);
    KVANT_RETURN_IF(open && !exact && !kvant_block_finds_page(tensor, block), kvant_no_page());
    if (shifted)
        KVANT_FORWARD(kvant_shifts_read(tensor, header.written, moved, &used, shifts));
    KVANT_FORWARD(kvant_transform_import(tensor, numbers, header.learned, &transform));
    if (header.written && header.learned && kvant_transforms_pending(tensor))
        kvant_transforms_begin(tensor, transform);
    kvant_block_clear(tensor, block);
    if (!header.written)
        return KVANT_OK;
    if (open && !exact)
        page = kvant_open_acquire(tensor, block, 0, 1);
    if (page >= 0) {
        tensor->open_pages[page].dirty = header.written;
        kvant_pages_copy(tensor, kvant_open_page_of(tensor, page, 0), pages,
                         page_bytes(tensor, true));
    }
    kvant_block_fill(tensor, block, transform,
                     kvant_transform_position(tensor, numbers, header.learned), header.written,
                     open ? NULL : pages);
    if (exact)
        tensor->blocks[block].resident = kvant_exact_store(tensor, block, header.written, pages);
    if (shifted)
        kvant_shifts_set_block(tensor, block, shifts);
    return kvant_pages_status(tensor);
}

/* Transforms that a caller sets or reads */

/* Whether some kv head has a centre, or a scale. */
static bool uses(const kvant_tensor *tensor, bool scale)
{
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const kvant_codec_info *info = &tensor->codecs[head]->info;
        if (scale ? info->norm != KVANT_NORM_NONE : info->center != KVANT_CENTER_NONE)
            return true;
    }
    return false;
}

static kvant_status check_affine(const kvant_tensor *tensor, const kvant_affine *affine)
{
    size_t n = kvant_tensor_width(tensor);
    if ((affine->center && !uses(tensor, false)) || (affine->scale && !uses(tensor, true)))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "the codec %s has no centre, or no scale, that can be set",
                          kvant_tensor_codec_info(tensor)->spec);
    for (size_t i = 0; i < n; i++) {
        float center = affine->center ? affine->center[i] : 0,
              scale = affine->scale ? affine->scale[i] : 1;
        KVANT_RETURN_IF(!isfinite(center) || !isfinite(scale), KVANT_ERR_NONFINITE);
        KVANT_RETURN_IF(!(scale > 0), KVANT_ERR_ARGUMENT);
    }
    return KVANT_OK;
}

kvant_status kvant_tensor_set_affine(kvant_tensor *tensor, const kvant_affine *affine)
{
    KVANT_RETURN_IF(!tensor || !affine || tensor->any_written, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(check_affine(tensor, affine));
    uint32_t transform;
    const kvant_transform_values numbers = { .center = affine->center,
                                             .scale = affine->scale,
                                             .learned = true };
    KVANT_FORWARD(kvant_transforms_find(tensor, &numbers, &transform));
    kvant_transforms_begin(tensor, transform);
    return KVANT_OK;
}
