/* twins_stored.h - the keys and values of a cache's layer, read from the bytes that the cache
 * exports. twins_attention.c computes attention over them. */
#ifndef KVANT_TESTS_TWINS_STORED_H
#define KVANT_TESTS_TWINS_STORED_H

#include "twins.h"

#include "../../src/cache/cuda_layers.h"

enum { RECORD_HEADER = 32, TRANSFORM_HEADER = 8, BLOCK_HEADER = 32 };

/* Keys or values of a block, from its export. */
typedef struct stored {
    bool open, learnt;
    float center[WIDTH], scale[WIDTH]; /* 0 and 1 if the codec has none */
    uint8_t *pages;
    size_t bytes;
} stored;

/* The blocks of a sequence's layer from block `first` on. */
typedef struct stored_layer {
    const kvant_codec *const *codecs[2]; /* by kvant_role */
    uint32_t n_blocks;
    stored blocks[2][MOST / 64];
} stored_layer;

static inline void read_numbers(const kvant_codec *const *codecs, const uint8_t *learnt,
                                stored *block)
{
    for (uint32_t i = 0; i < WIDTH; i++) {
        kvant_cuda_tables tables = { .size = sizeof tables };
        assert_int_equal(kvant_cuda_codec_tables(codecs[i / DIM], &tables), KVANT_OK);
        block->center[i] = tables.center ? tables.center[i % DIM] : 0;
        block->scale[i] = tables.scale ? tables.scale[i % DIM] : 1;
    }
    if (learnt) {
        memcpy(block->center, learnt, sizeof block->center);
        memcpy(block->scale, learnt + sizeof block->center, sizeof block->scale);
    }
}

static inline void read_block(const kvant_codec *const *codecs, const uint8_t *at, size_t size,
                              stored *block)
{
    const uint8_t *numbers = at + RECORD_HEADER + TRANSFORM_HEADER, *header = numbers;
    uint64_t coded;
    uint32_t open, learnt;
    memcpy(&learnt, at + RECORD_HEADER, sizeof learnt);
    header += learnt ? 2 * WIDTH * sizeof(float) : 0;
    memcpy(&coded, header + 8, sizeof coded);
    memcpy(&open, header + 16, sizeof open);
    const size_t pages = (size_t)(header - at) + BLOCK_HEADER;
    block->open = open, block->learnt = learnt;
    block->bytes = coded ? 64 * WIDTH * sizeof(uint16_t)    /* codes follow, too */
                         : size - pages - sizeof(uint64_t); /* a checksum follows */
    block->pages = malloc(block->bytes);
    memcpy(block->pages, at + pages, block->bytes);
    read_numbers(codecs, learnt ? numbers : NULL, block);
}

/* Whether a row of an exact page came from codes: it equals the row that its block's codes decode
 * to.
 *
 * A GPU adds and multiplies in another order. Some dozen roundings to fp32 err by less than 2^-18
 * of the row's largest number. Then a number may be rounded to the fp16 number next to the CPU's,
 * which is at most 2^-10 of it away. */
static inline bool came_from_codes(const kvant_codec *codec, const uint8_t *page, uint32_t slot,
                                   const uint16_t *row)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    float y[DIM], x[DIM], most = 0;
    kvant_codec_decode_transformed(codec, kernels, page, slot, y);
    kernels->half_to_float(row, x, DIM);
    for (uint32_t j = 0; j < DIM; j++)
        most = fmaxf(most, fabsf(y[j]));
    for (uint32_t j = 0; j < DIM; j++)
        if (!(fabsf(x[j] - y[j]) <= 0x1p-10f * fabsf(y[j]) + 0x1p-18f * most))
            return false;
    return true;
}

/* Reads the rows of a block with an exact page (cuda_exact.c). Attention reads them as fp16, which
 * differs from an export. They are the encoded rows after rounding, or came from codes when the
 * block got its page. */
static inline void read_exact(twins *t, int32_t s, uint32_t layer, kvant_role role, uint32_t index,
                              stored *block)
{
    const cuda_part *part = &kvant_cuda_layer(t->gpu, layer)->parts[role];
    const uint32_t number = (uint32_t)t->gpu->sequences[s].table[index];
    const int32_t at = kvant_cuda_exact_page(part, number);
    const size_t n = 64 * WIDTH;
    t->waited += at >= 0;
    if (at < 0 || !part->floats) /* without floats, an export has the fp16 rows themselves */
        return;
    float *floats = malloc(n * sizeof *floats);
    uint16_t *rounded = malloc(n * sizeof *rounded), *rows = malloc(n * sizeof *rows);
    device_read(rows, (uint8_t *)kvant_cuda_exact_pages(part).base + (size_t)at * n * sizeof *rows,
                n * sizeof *rows);
    device_read(floats, part->floats + (size_t)at * n, n * sizeof *floats);
    kvant_kernels_get(KVANT_CPU_AUTO)->float_to_half(floats, rounded, n);
    for (uint32_t i = 0; i < 64 * KV_HEADS; i++)
        if (64 * index + i % 64 < twins_length(t, s) &&
            memcmp(rows + i * DIM, rounded + i * DIM, 2 * DIM) != 0)
            assert_true(came_from_codes(part->tensor->codecs[i / 64],
                                        block->pages + part->tensor->page_offsets[i / 64], i % 64,
                                        rows + i * DIM));
    free(block->pages);
    block->open = true;
    block->bytes = n * sizeof *rows;
    block->pages = (uint8_t *)rows;
    free(floats);
    free(rounded);
}

static inline void read_layer(twins *t, int32_t s, uint32_t layer, stored_layer *all)
{
    const uint32_t first = t->dropped[s], n = (twins_length(t, s) + 63) / 64 - first;
    *all = (stored_layer){ .n_blocks = n };
    for (int role = 0; role < 2; role++)
        all->codecs[role] = twins_codecs(t, layer, (kvant_role)role);
    for (uint32_t b = 0; b < n; b++) {
        twins_export(t, s, first + b);
        const uint8_t *at = t->of_gpu + sizeof(uint64_t);
        for (uint32_t i = 0; i < 2 * layer + 2; i++) {
            uint64_t size;
            memcpy(&size, at, sizeof size);
            at += sizeof size;
            if (i / 2 == layer)
                read_block(all->codecs[i % 2], at, size, &all->blocks[i % 2][b]);
            if (i / 2 == layer)
                read_exact(t, s, layer, (kvant_role)(i % 2), first + b, &all->blocks[i % 2][b]);
            at += size;
        }
    }
}

static inline void free_layer(stored_layer *all)
{
    for (uint32_t i = 0; i < 2 * all->n_blocks; i++)
        free(all->blocks[i % 2][i / 2].pages);
}

#endif
