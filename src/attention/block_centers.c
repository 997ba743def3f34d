/* block_centers.c - see block_centers.h. */
#include "block_centers.h"

#include <string.h>

#include "../cache/center.h"

/* The centres of the position bucket that the block of a page has its centre from, or NULL when the
 * block has no centre. */
static const kvant_centers *centers_of(const kvant_attention_plan *plan, uint32_t page)
{
    const int64_t block = kvant_attention_block(plan, page);
    return block < 0 ? NULL : kvant_block_centers(plan->k, (uint32_t)block);
}

/* The position of a block that has a centre. */
static int32_t position_of(const kvant_attention_plan *plan, uint32_t page)
{
    return plan->k->blocks[kvant_attention_block(plan, page)].position;
}

static uint32_t end_of_chunk(const kvant_attention_plan *plan, uint32_t first)
{
    return plan->n_pages - first < KVANT_ATTENTION_CHUNK ? plan->n_pages
                                                         : first + KVANT_ATTENTION_CHUNK;
}

/* Whether the blocks of a chunk are consecutive and their centres rotate at the same speeds as
 * `of`. *position becomes the position of the chunk's first page. */
static bool is_in_order(const kvant_attention_plan *plan, uint32_t first, const kvant_centers *of,
                        int64_t *position)
{
    const kvant_centers *last = of;
    bool any = false;
    for (uint32_t page = first; page < end_of_chunk(plan, first); page++) {
        const kvant_centers *own = centers_of(plan, page);
        if (!own)
            continue;
        const int64_t at = position_of(plan, page) - (int64_t)KVANT_PAGE_TOKENS * (page - first);
        if ((any && at != *position) || (own != last && !kvant_centers_same_rope(own, of)))
            return false;
        *position = at;
        last = own;
        any = true;
    }
    return any;
}

/* The first centres that any view's transform has. The centres of most other transforms rotate at
 * the same speeds. */
static const kvant_centers *first_centers(const kvant_attention_plan *plan)
{
    const kvant_centers *centers = NULL;
    for (uint32_t i = 0; i < plan->k_views.n && !centers; i++)
        centers = kvant_tensor_transform_centers(plan->k, plan->k_views.transform_id[i]);
    return centers;
}

/* Writes the phase of a page to its column of the chunk. */
static void fill_phase(const kvant_rope_rotation *rotation, float *to)
{
    const size_t n = rotation->n;
    for (size_t i = 0; i < n; i++) {
        to[i * KVANT_ATTENTION_CHUNK] = rotation->cosine[i];
        to[(n + i) * KVANT_ATTENTION_CHUNK] = rotation->sine[i];
    }
}

static void begin_blocks(const kvant_centers *of, kvant_rope_rotation *rotation)
{
    kvant_rope_rotation_over(rotation, of->pairs, of->n);
    kvant_rope_rotation_expect(rotation, KVANT_PAGE_TOKENS, of->step, of->step + of->n);
}

/* Fills a chunk page by page. Columns of hidden pages stay zero. */
static void fill_chunk(const kvant_attention_plan *plan, uint32_t first, float *phases)
{
    const kvant_centers *of = NULL;
    kvant_rope_rotation rotation;
    memset(phases, 0, (size_t)plan->k_dim * KVANT_ATTENTION_CHUNK * sizeof *phases);
    for (uint32_t page = first; page < end_of_chunk(plan, first); page++) {
        const kvant_centers *own = centers_of(plan, page);
        if (!own)
            continue;
        if (own != of)
            begin_blocks(own, &rotation);
        of = own;
        kvant_rope_rotation_move(&rotation, position_of(plan, page));
        fill_phase(&rotation, phases + page - first);
    }
}

/* Writes the phases of consecutive blocks from position 0 on. Prepares the rotation that steps from
 * one such chunk to the next. */
static void begin_chunks(const kvant_attention_plan *plan, const kvant_centers *of,
                         kvant_rope_rotation *rotation, float *phases)
{
    const uint32_t n_pages = end_of_chunk(plan, 0);
    kvant_rope_rotation blocks;
    memset(phases, 0, (size_t)plan->k_dim * KVANT_ATTENTION_CHUNK * sizeof *phases);
    begin_blocks(of, &blocks);
    for (uint32_t page = 0; page < n_pages; page++) {
        fill_phase(&blocks, phases + page);
        kvant_rope_rotation_move(&blocks, (page + (int64_t)1) * KVANT_PAGE_TOKENS);
    }
    kvant_rope_rotation_over(rotation, of->pairs, of->n);
    kvant_rope_rotation_expect(rotation, blocks.position, blocks.at.cosine, blocks.at.sine);
}

void kvant_attention_fill_phases(const kvant_attention_plan *plan, float *phases)
{
    const kvant_centers *of = first_centers(plan);
    const size_t size = kvant_attention_chunk_floats(plan);
    kvant_rope_rotation rotation;
    begin_chunks(plan, of, &rotation, phases);
    for (uint32_t first = 0; first < plan->n_pages; first += KVANT_ATTENTION_CHUNK) {
        int64_t position = 0;
        phases += size;
        phases[size - 1] = is_in_order(plan, first, of, &position);
        if (phases[size - 1] == 0) {
            fill_chunk(plan, first, phases);
            continue;
        }
        kvant_rope_rotation_move(&rotation, position);
        memcpy(phases, rotation.cosine, of->n * sizeof *phases);
        memcpy(phases + of->n, rotation.sine, of->n * sizeof *phases);
    }
}

/* Rotates the products for a chunk at position 0 to a chunk whose first block has this phase. A
 * separate function, because `restrict` on its arguments lets the compiler vectorise the loop. */
static void rotate_products(uint32_t n_pairs, const float *restrict phase,
                            const float *restrict from, float *restrict to)
{
    const float *cosine = phase, *sine = phase + n_pairs;
    for (uint32_t i = 0; i < n_pairs; i++) {
        to[i] = from[i] * cosine[i] + from[n_pairs + i] * sine[i];
        to[n_pairs + i] = from[n_pairs + i] * cosine[i] - from[i] * sine[i];
    }
}

/* Computes the term that scores lack for each page of a chunk whose blocks have their own centres.
 * The tile of keys is free between two pages, so it holds the rotated products. */
static void fill_offsets(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                         const kvant_attention_item *item, uint32_t chunk)
{
    const size_t k_dim = plan->k_dim;
    const uint32_t d = plan->k->head_dim;
    const size_t size = kvant_attention_chunk_floats(plan);
    float *centers = kvant_item_centers(plan, item);
    const float *start = item->phases, *own = start + (chunk + 1) * size;
    const bool in_order = own[size - 1] != 0;
    memset(centers, 0, (size_t)item->n_rows * KVANT_ATTENTION_CHUNK * sizeof(float));
    for (uint32_t row = 0, n; row < item->n_rows; row += n) {
        const float *products = kvant_item_products(plan, item) + row * k_dim;
        n = item->n_rows - row < KVANT_PAGE_TOKENS ? item->n_rows - row : KVANT_PAGE_TOKENS;
        for (uint32_t i = 0; in_order && i < n; i++)
            rotate_products(d / 2, own, products + i * k_dim, item->k_tile + i * k_dim);
        kernels->matmul(in_order ? item->k_tile : products, k_dim, in_order ? start : own,
                        KVANT_ATTENTION_CHUNK, centers + (size_t)row * KVANT_ATTENTION_CHUNK,
                        KVANT_ATTENTION_CHUNK, n, d, KVANT_ATTENTION_CHUNK);
    }
}

void kvant_attention_find_offsets(const kvant_attention_plan *plan, const kvant_kernels *kernels,
                                  kvant_attention_item *item, uint32_t page)
{
    const uint32_t chunk = page / KVANT_ATTENTION_CHUNK;
    item->page_offsets = kvant_item_offsets(plan, item);
    item->offset_stride = 1;
    if (!plan->centered || !centers_of(plan, page))
        return;
    if (item->chunks[item->k_view] != chunk + 1)
        fill_offsets(plan, kernels, item, chunk);
    item->chunks[item->k_view] = chunk + 1;
    item->page_offsets = kvant_item_centers(plan, item) + page % KVANT_ATTENTION_CHUNK;
    item->offset_stride = KVANT_ATTENTION_CHUNK;
}
