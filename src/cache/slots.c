/* slots.c - reads some slots of a block without the rest, and forgets slots of a block.
 *
 * A sequence that was cut, or that shares a block with a longer sequence, exports a block in which
 * it has fewer rows than the block holds. A slot that is left out leaves no bit: the bytes are the
 * same as of a block that never had the slot. */
#include <string.h>

#include "../base/alloc.h"
#include "../base/attributes.h"
#include "tensor.h"

#define ALL_SLOTS UINT64_MAX

/* All slots of the groups of tokens that contain one of `slots`. */
static uint64_t whole_groups(const kvant_tensor *tensor, uint64_t slots)
{
    const uint32_t n = kvant_tensor_codec_info(tensor)->block_tokens;
    const uint64_t first_group = ALL_SLOTS >> (KVANT_PAGE_TOKENS - n);
    uint64_t groups = 0;
    for (uint32_t first = 0; first < KVANT_PAGE_TOKENS; first += n)
        if (slots & first_group << first)
            groups |= first_group << first;
    return groups;
}

bool kvant_slots_share_scales(const kvant_tensor *tensor, uint64_t written, uint64_t slots)
{
    return (whole_groups(tensor, written & slots) & written & ~slots) != 0;
}

static bool shares_scales(const kvant_tensor *tensor, uint32_t block, uint64_t slots)
{
    return kvant_slots_share_scales(tensor, tensor->blocks[block].written, slots);
}

bool kvant_slots_as_open(const kvant_tensor *tensor, uint32_t block, uint64_t slots)
{
    return tensor->blocks[block].open_page >= 0 || kvant_exact_page(tensor, block) ||
           shares_scales(tensor, block, slots);
}

/* Open pages */

void kvant_slots_erase_rows(const kvant_tensor *tensor, uint64_t slots, uint8_t *pages)
{
    const size_t row = tensor->head_dim * sizeof(uint16_t);
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
            if (!(slots >> t & 1))
                memset(pages + head * tensor->open_page_bytes + t * row, 0, row);
}

/* Writes rows of sealed pages as fp16. So they carry no information about rows that share their
 * scales. */
static void unseal(const kvant_tensor *tensor, uint64_t slots, const uint8_t *sealed,
                   uint8_t *pages)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const size_t row = tensor->head_dim * sizeof(uint16_t);
    memset(pages, 0, kvant_open_block_bytes(tensor));
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++)
        for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
            float y[KVANT_MAX_HEAD_DIM];
            uint16_t half[KVANT_MAX_HEAD_DIM];
            if (!(slots >> t & 1))
                continue;
            kvant_codec_decode_transformed(tensor->codecs[head], kernels,
                                           sealed + tensor->page_offsets[head], t, y);
            kvant_limit_to_half(y, tensor->head_dim);
            kvant_codec_encode_open(tensor->codecs[head], kernels, y, 0, 1, half);
            memcpy(pages + head * tensor->open_page_bytes + t * row, half, row);
        }
}

static void read_open(const kvant_tensor *tensor, uint32_t block, uint64_t slots, uint8_t *pages)
{
    const kvant_block *b = &tensor->blocks[block];
    const uint8_t *sealed = kvant_sealed_page(tensor, block, 0);
    const void *open = b->open_page >= 0 ? kvant_open_page_of(tensor, b->open_page, 0)
                                         : kvant_exact_page(tensor, block);
    if (open) {
        kvant_pages_read(tensor, pages, open, kvant_open_block_bytes(tensor));
        kvant_slots_erase_rows(tensor, slots, pages);
        return;
    }
    if (tensor->device) {
        kvant_pages_read(tensor, tensor->staging, sealed, tensor->block_bytes);
        sealed = tensor->staging;
    }
    unseal(tensor, slots, sealed, pages);
}

/* Sealed pages */

/* Sets in `bits` every bit of a page that belongs to tokens of `slots`. Encoding a row writes all
 * bits of its token and no others. So these bits are the same after encoding into a page of zeros
 * and into a page of ones. room: a page. */
static void find_bits(const kvant_codec *codec, uint64_t slots, uint8_t *bits, uint8_t *room,
                      const float *zeros)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    const uint32_t n = codec->info.block_tokens;
    const size_t bytes = codec->info.page_bytes;
    memset(bits, 0, bytes);
    memset(room, 0xff, bytes);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t += n)
        if (slots >> t & 1) {
            kvant_codec_encode_transformed(codec, kernels, zeros, t, n, bits);
            kvant_codec_encode_transformed(codec, kernels, zeros, t, n, room);
        }
    for (size_t i = 0; i < bytes; i++)
        bits[i] = (uint8_t) ~(bits[i] ^ room[i]);
}

/* Clears the bits of all slots except `groups`, which are whole groups. Encoding takes most of the
 * time, so the smaller set of slots is encoded, once for all pages of equal specs, whose tokens
 * have the same bits. */
static void erase_sealed(const kvant_tensor *tensor, uint64_t groups, uint8_t *pages, uint8_t *bits,
                         const float *zeros)
{
    const bool kept = 2 * kvant_count_slots(groups) <= KVANT_PAGE_TOKENS;
    const kvant_codec *found = NULL;
    for (uint32_t head = 0; head < tensor->n_kv_heads; head++) {
        const kvant_codec *codec = tensor->codecs[head];
        const size_t bytes = codec->info.page_bytes;
        uint8_t *page = pages + tensor->page_offsets[head];
        if (!found || strcmp(found->info.spec, codec->info.spec) != 0)
            find_bits(codec, kept ? groups : ~groups, bits, bits + tensor->block_bytes, zeros);
        found = codec;
        for (size_t i = 0; i < bytes; i++)
            page[i] &= kept ? bits[i] : (uint8_t)~bits[i];
    }
}

kvant_status kvant_slots_erase_codes(const kvant_tensor *tensor, uint64_t slots, uint8_t *pages)
{
    const uint64_t groups = whole_groups(tensor, slots);
    const size_t group = (size_t)kvant_tensor_codec_info(tensor)->block_tokens * tensor->head_dim;
    if (groups == ALL_SLOTS)
        return KVANT_OK;
    float *zeros = kvant_alloc(group, sizeof *zeros);
    uint8_t *bits = kvant_alloc(2, tensor->block_bytes);
    if (zeros && bits)
        erase_sealed(tensor, groups, pages, bits, zeros);
    const kvant_status status = zeros && bits ? KVANT_OK : KVANT_ERR_MEMORY;
    kvant_free(zeros);
    kvant_free(bits);
    return status;
}

static kvant_status read_sealed(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                                uint8_t *pages)
{
    kvant_pages_read(tensor, pages, kvant_sealed_page(tensor, block, 0), tensor->block_bytes);
    return kvant_slots_erase_codes(tensor, slots, pages);
}

uint64_t kvant_slots_coded(const kvant_tensor *tensor, uint32_t block, uint64_t slots)
{
    const kvant_block *b = &tensor->blocks[block];
    if (b->open_page < 0 || !b->resident)
        return 0;
    const uint64_t coded = b->written & slots & ~tensor->open_pages[b->open_page].dirty;
    return shares_scales(tensor, block, coded) ? 0 : coded;
}

kvant_status kvant_slots_read_codes(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                                    uint8_t *pages)
{
    KVANT_FORWARD(read_sealed(tensor, block, slots, pages));
    return kvant_pages_status(tensor);
}

kvant_status kvant_slots_read(const kvant_tensor *tensor, uint32_t block, uint64_t slots,
                              uint8_t *pages)
{
    const uint64_t kept = tensor->blocks[block].written & slots;
    if (kvant_slots_as_open(tensor, block, slots))
        read_open(tensor, block, kept, pages);
    else
        KVANT_FORWARD(read_sealed(tensor, block, kept, pages));
    return kvant_pages_status(tensor);
}

/* Forgetting */

void kvant_block_keep(kvant_tensor *tensor, uint32_t block, uint64_t slots)
{
    kvant_block *b = &tensor->blocks[block];
    const uint64_t written = b->written, kept = written & slots;
    if (kept == written)
        return;
    if (!kept) {
        kvant_block_clear(tensor, block);
        return;
    }
    const bool unseals = b->open_page < 0 && shares_scales(tensor, block, slots);
    b->written = kept;
    if (unseals && !kvant_open_block(tensor, block, b->transform_id, 1)) {
        b->written = written; /* memory is short; exports leave these slots out nevertheless */
        return;
    }
    if (b->open_page < 0)
        return;
    kvant_open_page *open = &tensor->open_pages[b->open_page];
    open->dirty = kvant_tensor_codec_info(tensor)->block_tokens > 1 ? kept : open->dirty & kept;
    open->counted &= kept;
}

void kvant_block_adopt(kvant_tensor *tensor, uint32_t block, uint32_t sequence)
{
    kvant_block *b = &tensor->blocks[block];
    if (b->sequence == sequence)
        return;
    /* The block's rows, and the rows before them, have the positions that the former sequence gave
     * them. */
    if (tensor->clocks[sequence] < tensor->clocks[b->sequence])
        tensor->clocks[sequence] = tensor->clocks[b->sequence];
    b->sequence = sequence;
}
