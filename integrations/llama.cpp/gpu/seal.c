/* seal.c - encodes rows of exact pages into the sealed pages of their blocks.
 *
 * Whole pages are sealed page by page, and other pages row by row. In a prompt's graph each layer
 * seals its pages by itself, while CUDA computes. fp16_pages.c and step.c decide which blocks give
 * their exact pages up. */
#include "gpu.h"

#include <stdlib.h>

/* Whether these are keys and values of a layer that one launch can encode together. */
static bool are_pair(const kvp_kv *a, const kvp_kv *b)
{
    const kvp_gpu_cells *x = a->cells, *y = b->cells;

    return a->shape.layer == b->shape.layer && a->shape.role != b->shape.role &&
           x->n_kv_heads == y->n_kv_heads && x->head_dim == y->head_dim && y->group == 1 &&
           y->open_pages.base != NULL;
}

/* Copies the rows' slots to the GPU. The pages of a tensor follow each other, so the rows of
 * several pages are rows of one matrix. Each page has 64 rows per kv head in it. The kernel looks
 * slots up at the first 64 of them, the rows of head 0. */
static bool upload_slots(kvp_gpu_cache *cache, const kvp_open_page *pages, uint32_t n,
                         uint32_t n_kv_heads, bool moved, cu_stream stream)
{
    const size_t rows = (size_t)n * n_kv_heads * KVANT_PAGE_TOKENS;
    int64_t *slots = malloc(rows * sizeof(*slots));
    bool ok =
        slots != NULL && kvp_gpu_grow(cache->gpu, &cache->moved, rows * sizeof(*slots), false);

    for (size_t i = 0; i < rows && ok; i++) {
        const kvp_open_page *page = &pages[i / (n_kv_heads * KVANT_PAGE_TOKENS)];
        const size_t row = i % (n_kv_heads * KVANT_PAGE_TOKENS);
        const uint64_t rows_of_page = page->dirty | (moved ? page->moved : 0);
        slots[i] = row < KVANT_PAGE_TOKENS && (rows_of_page >> row & 1)
                       ? (int64_t)page->block * KVANT_PAGE_TOKENS + (int64_t)row
                       : -1;
    }
    ok = ok && kvp_cu_write(cache->moved.at, slots, rows * sizeof(*slots), stream);
    free(slots);
    return ok;
}

static void add_rows(kvant_cuda_append_args *args, const kvp_kv *kv, uint32_t page)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvant_cuda_pages *open = &cells->open_pages;

    *(kv->shape.role == KVANT_ROLE_K ? &args->k : &args->v) =
        (kvant_cuda_rows){ .codec = cells->codec,
                           .pages = cells->pages,
                           .rows = kvp_gpu_block_memory(open, page),
                           .token_stride = cells->head_dim,
                           .head_stride = open->head_stride / sizeof(uint16_t) };
}

/* The tensors whose rows are encoded. In some pages more rows of keys than of values have to be
 * encoded. */
typedef enum roles { KEYS, VALUES, BOTH } roles;

static bool is_among(const kvp_kv *kv, roles of)
{
    return of == BOTH || (kv->shape.role == KVANT_ROLE_K) == (of == KEYS);
}

/* Encodes rows, not encoded yet, of the n pages from page `first` on. pages: the exact pages before
 * the step. layer: a tensor of the layer whose rows are encoded; NULL: the rows of all layers. */
static bool encode_run(kvp_gpu_cache *cache, const kvp_open_page *pages, uint32_t first, uint32_t n,
                       roles of, const kvp_kv *layer, cu_stream stream)
{
    uint32_t heads = 0; /* heads that the slots were made for */
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok; i++) {
        const kvp_kv *kv = cache->tensors[i];
        const kvp_gpu_cells *cells = kv->cells;
        if (!is_among(kv, of) || cells->in_place || cells->group > 1 ||
            (layer != NULL && kv->shape.layer != layer->shape.layer))
            continue;
        kvant_cuda_append_args args = { .size = sizeof(args),
                                        .type = KVANT_CUDA_F16,
                                        .n_tokens =
                                            ((n - 1) * cells->n_kv_heads + 1) * KVANT_PAGE_TOKENS,
                                        .n_kv_heads = cells->n_kv_heads,
                                        .refused = kvp_gpu_word(cells->gpu->unsealed),
                                        .transformed = 1 };
        ok = cells->open_pages.base != NULL &&
             (heads == cells->n_kv_heads ||
              upload_slots(cache, pages, n, cells->n_kv_heads, of == KEYS, stream));
        heads = cells->n_kv_heads;
        args.slots = cache->moved.at;
        add_rows(&args, kv, first);
        if (of == BOTH && i + 1 < cache->n_tensors && are_pair(kv, cache->tensors[i + 1]))
            add_rows(&args, cache->tensors[++i], first);
        ok = ok && kvant_cuda_append(&args, stream) == KVANT_OK;
    }
    return ok;
}

/* Pages that prompts leave are sealed 8 at a time. A launch of encode_run takes one and a half
 * times as long for them on an H200, because the kernel divides its rows among fewer thread
 * blocks. */
#define SEALED_AT_ONCE 8u

static bool is_whole(const kvp_open_page *page)
{
    return page->dirty == UINT64_MAX;
}

static bool is_partly_dirty(const kvp_open_page *page)
{
    return !is_whole(page) && (page->dirty | page->moved) != 0;
}

/* On the GPU, the pages that kvant_cuda_seal seals: their numbers, their blocks, and how many of
 * their tokens are written. Whole pages come first, and are sealed with any codec. Pages with fewer
 * rows to encode are sealed with codecs whose groups have several tokens. */
typedef int32_t page_lists[3][KVP_MOST_PAGES];

static void list_page(const kvp_gpu_cache *cache, const kvp_open_page *pages, uint32_t page,
                      page_lists lists, uint32_t at)
{
    const int32_t block = pages[page].block;

    lists[0][at] = (int32_t)page;
    lists[1][at] = block;
    lists[2][at] = kvp_gpu_tokens_of(cache->written[block] | pages[page].dirty);
}

static bool list_pages(kvp_gpu_cache *cache, const kvp_open_page *pages, kvp_gpu_sealing *sealing,
                       cu_stream stream)
{
    page_lists lists = { 0 };

    sealing->n_whole = sealing->n = 0;
    for (uint32_t i = 0; i < cache->n_pages; i++)
        if (is_whole(&pages[i]))
            list_page(cache, pages, i, lists, sealing->n_whole++);
    sealing->n = sealing->n_whole;
    for (uint32_t i = 0; i < cache->n_pages && cache->has_groups; i++)
        if (!is_whole(&pages[i]) && pages[i].dirty != 0)
            list_page(cache, pages, i, lists, sealing->n++);
    return sealing->n == 0 || (kvp_gpu_grow(cache->gpu, &sealing->lists, sizeof(lists), false) &&
                               kvp_cu_write(sealing->lists.at, lists, sizeof(lists), stream));
}

static void add_pages(kvant_cuda_seal_args *args, const kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;

    *(kv->shape.role == KVANT_ROLE_K ? &args->k : &args->v) =
        (kvant_cuda_seal_pages){ cells->codec, cells->open_pages, cells->pages };
}

/* Seals the pages that are listed, of one tensor or of keys and values. */
static bool seal_pages(const kvant_cuda_seal_args *tensors, const kvp_gpu_sealing *sealing,
                       bool groups, cu_stream stream)
{
    const int32_t *numbers = sealing->lists.at;
    const uint32_t n = groups ? sealing->n : sealing->n_whole;
    kvant_cuda_seal_args args = *tensors;
    bool ok = true;

    for (uint32_t i = 0; i < n && ok; i += args.n_blocks) {
        args.n_blocks = n - i < SEALED_AT_ONCE ? n - i : SEALED_AT_ONCE;
        args.from = numbers + i;
        args.to = numbers + KVP_MOST_PAGES + i;
        args.tokens = groups ? numbers + 2 * (size_t)KVP_MOST_PAGES + i : NULL;
        ok = kvant_cuda_seal(&args, stream) == KVANT_OK;
    }
    return ok;
}

/* Seals the pages that are listed. layer: as for encode_run. */
static bool seal_listed(const kvp_gpu_cache *cache, const kvp_gpu_sealing *sealing,
                        const kvp_kv *layer, cu_stream stream)
{
    bool ok = true;

    for (size_t i = 0; i < cache->n_tensors && ok && sealing->n > 0; i++) {
        const kvp_kv *kv = cache->tensors[i];
        const kvp_gpu_cells *cells = kv->cells;
        kvant_cuda_seal_args args = { .size = sizeof(args),
                                      .n_kv_heads = cells->n_kv_heads,
                                      .refused = kvp_gpu_word(cells->gpu->unsealed) };
        if (cells->in_place || (layer != NULL && kv->shape.layer != layer->shape.layer))
            continue;
        add_pages(&args, kv);
        if (cells->group == 1 && i + 1 < cache->n_tensors && are_pair(kv, cache->tensors[i + 1]))
            add_pages(&args, cache->tensors[++i]);
        ok = cells->open_pages.base != NULL && seal_pages(&args, sealing, cells->group > 1, stream);
    }
    return ok;
}

bool kvp_gpu_encode_pages(kvp_gpu_cache *cache, const kvp_open_page *pages, const kvp_kv *kv,
                          cu_stream stream)
{
    bool ok = list_pages(cache, pages, &cache->sealing, stream) &&
              seal_listed(cache, &cache->sealing, kv, stream);

    for (uint32_t i = 0, n = 1; i < cache->n_pages && ok; i += n) {
        bool moved = false;
        for (n = 0; i + n < cache->n_pages && is_partly_dirty(&pages[i + n]); n++)
            moved = moved || pages[i + n].moved != 0;
        if (n > 0 && moved)
            ok = encode_run(cache, pages + i, i, n, KEYS, kv, stream) &&
                 encode_run(cache, pages + i, i, n, VALUES, kv, stream);
        else if (n > 0)
            ok = encode_run(cache, pages + i, i, n, BOTH, kv, stream);
        n += n == 0;
    }
    return ok;
}

/* Sealing ahead */

bool kvp_gpu_may_seal_ahead(const kvp_gpu_cache *cache, const kvp_open_page *leaving)
{
    bool any = false, whole = true;

    for (uint32_t i = 0; i < cache->n_pages; i++) {
        any = any || is_whole(&leaving[i]);
        whole = whole && !is_partly_dirty(&leaving[i]);
    }
    return any && whole && !cache->late.any;
}

/* No token sees a layer's page as sealed before the layer's attention, and no new row goes to the
 * page before that. So there is time until then. */
bool kvp_gpu_seal_ahead(kvp_gpu_cache *cache, const kvp_open_page *leaving, cu_stream stream)
{
    if (!list_pages(cache, leaving, &cache->sealing, stream))
        return false;
    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *cells = cache->tensors[i]->cells;
        cells->late = !cells->in_place;
    }
    cache->late.any = cache->late.seals = true;
    return true;
}

bool kvp_gpu_seal_layer(const kvp_kv *kv)
{
    const kvp_gpu_cells *cells = kv->cells;
    const kvp_gpu_cache *cache = cells->cache;

    for (size_t i = 0; i < cache->n_tensors; i++) {
        kvp_gpu_cells *of = cache->tensors[i]->cells;
        of->late = of->late && cache->tensors[i]->shape.layer != kv->shape.layer;
    }
    return seal_listed(cache, &cache->sealing, kv, cells->gpu->stream);
}
