/* transfer.c - copies blocks between tensors, and sets the transform that a caller brings. record.c
 * exports and imports blocks. */
#include <string.h>

#include "../base/error.h"
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
        const kvant_transform_values numbers = { transform->center,
                                                 transform->scale,
                                                 key_transform ? key_transform->triangles : NULL,
                                                 key_transform ? key_transform->centers : NULL,
                                                 transform->learned,
                                                 1 };
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

/* The largest age that is believed. With a larger one no position would be left for later rows. */
#define MOST_AGE (UINT64_C(1) << 30)

uint64_t kvant_block_age(const kvant_tensor *tensor, uint32_t block)
{
    /* A sink may have any age. With the number of all rows, a tensor that takes the block counts as
     * many rows as this one. */
    if (kvant_is_sink(tensor, block))
        return tensor->clocks[tensor->blocks[block].sequence];
    const int64_t age = tensor->plan ? kvant_plan_age(tensor->plan, block) : 0;
    return age > 0 ? (uint64_t)age : 0;
}

int32_t kvant_block_acquire(kvant_tensor *tensor, uint32_t block, uint64_t age)
{
    uint64_t *clock = &tensor->clocks[tensor->blocks[block].sequence];
    age = age < MOST_AGE ? age : MOST_AGE;
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
