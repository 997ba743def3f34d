/* kv_fill.c - see kv_fill.h. Computes the sizes of one tensor, and for how many tokens it is f16 in
 * place. buffer_region.c adds up the tensors.
 *
 * All numbers follow from kvp_kv_full_size, or come from kvant_tensor and gpu/size.c. */
#include <math.h>

#include "gpu/gpu.h"
#include "kv_layers.h"
#include "kv_tensor.h"

static double blocks_of(double tokens)
{
    return ceil(tokens / KVANT_PAGE_TOKENS);
}

/* A tensor makes a transform for each doubling of the position, the last one up to the end of the
 * context. After `tokens` tokens it has as many transforms as a tensor for these positions. */
static uint32_t positions_of(const kvp_kv *kv, double tokens)
{
    const uint32_t all = kvp_kv_n_positions(kv);
    uint32_t n = 1;

    while (n < tokens && n < all)
        n = n <= all / 2 ? 2 * n : all;
    return n;
}

/* The cells of a stream that have a row. The cache of a sliding window has fewer cells than
 * tokens. */
static double cells_of(const kvp_kv *kv, double tokens)
{
    return tokens < kv->shape.n_cells ? tokens : kv->shape.n_cells;
}

/* Reduces a size in the computer's memory, where a page exists once it is written. Blocks with a
 * row count in full. So do the tensor's fp16 pages until all of them are in use. The pages that
 * tensors share for the rows of a step count in full, as in kvp_kv_count. */
static void shrink_computers(const kvp_kv *kv, double tokens, kvp_kv_size *size)
{
    const double n_blocks = blocks_of(cells_of(kv, tokens)) * kv->shape.n_streams;
    const double rows = n_blocks * KVANT_PAGE_TOKENS * (double)kvp_kv_row_bytes(kv);
    const double codes = size->bytes - size->exact - size->transforms;
    const double own = size->exact - (double)kv->shared;

    size->exact = (double)kv->shared + (own < rows ? own : rows);
    size->transforms =
        (double)(kvp_kv_info_up_to(kv, positions_of(kv, tokens)).learned_most + kv->calibrated);
    size->bytes = codes * n_blocks / kvp_kv_blocks(&kv->shape) + size->exact + size->transforms;
}

/* Reduces a size on a GPU. Its pages are reserved as a whole, and transforms are made when their
 * positions are reached. */
static void shrink_gpus(const kvp_kv *kv, const kvant_codec *const *codecs, double tokens,
                        kvp_kv_size *size)
{
    const uint32_t all = kvp_kv_n_positions(kv);
    const double pages = size->bytes - size->transforms;

    if (kv->shape.latents)
        return;
    size->transforms = (double)kvp_gpu_transform_bytes(
        &kv->shape, codecs, kv->shape.row / kv->head_dim, tokens < all ? (uint32_t)tokens : all);
    size->bytes = pages + size->transforms;
}

bool kvp_kv_size_at(const kvp_kv *kv, bool on_gpu, double tokens, kvp_kv_size *size)
{
    const double cells = cells_of(kv, tokens);
    const kvant_codec *const *codecs = kvp_kv_codecs(kv);

    if (codecs == NULL || (!on_gpu && kv->roped) || !kvp_kv_full_size(kv, codecs, on_gpu, size))
        return false;
    if (on_gpu)
        shrink_gpus(kv, codecs, tokens, size);
    else
        shrink_computers(kv, tokens, size);
    size->cells = cells * kv->shape.n_streams;
    size->codec_bits *= cells / kv->shape.n_cells;
    size->numbers[kv->shape.role] *= cells / kv->shape.n_cells;
    return true;
}

/* In place */

/* The most cells in place in the computer's memory, unless the user sets KVANT_EXACT. With about
 * 500 tokens kvant's attention is as fast as ggml's on f16 (SmolLM2, 8 threads). With more cells
 * decoding would be slower. */
#define CELLS_ON_CPU 512u

static size_t fit_in(const kvp_kv *kv, size_t bytes, size_t most)
{
    const size_t fit = bytes / kvp_kv_row_bytes(kv);
    size_t n = kv->shape.n_cells;

    if (kv->shape.n_streams != 1)
        return 0;
    n = fit < n ? fit : n;
    n = most < n ? most : n;
    return n / KVP_CELLS_PADDING * KVP_CELLS_PADDING;
}

/* The pages of a tensor in the computer's memory take fewer bytes than it reserves, because it
 * reserves enough for every head_dim. */
static size_t fit_on_cpu(const kvp_kv *kv)
{
    kvant_tensor_info info = { .size = sizeof(info) };

    if (kv->placement == NULL || kvant_tensor_get_info(kv->tensor, &info) != KVANT_OK)
        return 0;
    return fit_in(kv, info.bytes, kv->settings->auto_exact ? CELLS_ON_CPU : kv->settings->exact);
}

size_t kvp_kv_cells_in_place(const kvp_kv *kv)
{
    return kv->remote != NULL ? fit_in(kv, kv->reserved, kv->settings->exact) : fit_on_cpu(kv);
}

/* Bytes that the tensor reserves on a GPU, or would reserve there. */
static size_t reserved_there(const kvp_kv *kv)
{
    kvp_kv_shape shape = kv->shape;
    char err[512];

    shape.in_order = true;
    return kv->remote != NULL ? kv->reserved
                              : kvp_kv_reserve_with(kv->settings, &shape, err, sizeof(err));
}

size_t kvp_kv_tokens_in_place(const kvp_kv *kv, bool on_gpu)
{
    const size_t n_layers = kvp_kv_n_layers(kv);
    size_t room = 0;

    if (on_gpu)
        room = fit_in(kv, reserved_there(kv), kv->settings->exact);
    else if (kvp_layers_in_cpu_graphs(kv->layers))
        room = fit_on_cpu(kv);
    if (room >= kv->shape.n_cells)
        return kvp_kv_n_positions(kv);
    return room > n_layers ? room - n_layers : 0;
}
