/* numbers.c - chunk codes as integers, for attention on codes: tables of directions and lengths rounded to 16 bits.
 *
 * A direction is rounded to 15 bits of the largest component, a length to 12 bits, their product to a whole number: at most 1/16,
 * 1/2 and 1/2 of the last place of what comes out, a step. */
#include <math.h>

#include "../base/alloc.h"
#include "codec_internal.h"

static void numbers_lines(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          kvant_code_lines *lines)
{
    const float step = codec->numbers->step;
    kvant_codec_token_metadata(kernels, (const uint16_t *)((const uint8_t *)page + codec->info.metadata_offset),
                               lines->scale);
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++)
        lines->scale[t] *= step;
}

static float largest_of(const float *x, size_t n)
{
    float largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    return largest;
}

static void fill(kvant_code_numbers *numbers, const float *directions, const float *lengths)
{
    kvant_chunk_numbers *chunk = &numbers->chunk;
    const uint32_t n_lengths = 1u << (numbers->layout->bits - chunk->index_bits);
    const size_t n = (size_t)4 << chunk->index_bits;
    const float largest = largest_of(directions, n), unit = largest / 32767;
    for (size_t i = 0; i < n; i++)
        numbers->entries[i] = (int16_t)lrintf(directions[i] / unit);
    float length_unit;
    if (lengths) {
        length_unit = largest_of(lengths, n_lengths) / KVANT_CODE_VALUE_MAX;
        for (uint32_t k = 0; k < 1u << KVANT_NUMBER_MAX_LENGTHS; k++)
            chunk->lengths[k] = (int16_t)lrintf(lengths[k % n_lengths] / length_unit);
    } else {
        chunk->step = KVANT_CODE_VALUE_MAX / (int32_t)(n_lengths - 1);
        length_unit = 1 / (float)chunk->step;
    }
    numbers->step = 32768 * unit * length_unit;
}

static void set_table(kvant_codec *codec)
{
    const kvant_layout *layout = &codec->layout;
    kvant_code_table *table = &codec->code_table;
    const uint32_t block = KVANT_PAGE_TOKENS;
    const bool key = layout->role == KVANT_ROLE_K;
    *table = (kvant_code_table){ .by_row = key, .n_bands = 1, .stride = block };
    table->band_tiles = key ? layout->column_tiles : layout->row_tiles;
    table->n_columns = key ? (4 * codec->numbers->layout->n_chunks + block - 1) / block * block : block;
    int32_t limit = INT32_MAX / (KVANT_CODE_VALUE_MAX * (int32_t)(KVANT_TILE * layout->column_tiles));
    table->limit = limit < KVANT_CODE_OPERAND_MAX ? limit : KVANT_CODE_OPERAND_MAX;
    codec->code_lines = numbers_lines;
}

kvant_status kvant_codec_offer_numbers(kvant_codec *codec, const kvant_chunk_layout *layout, uint32_t components,
                                       uint32_t index_bits, const float *directions, const float *lengths,
                                       const kvant_error *error)
{
    if (layout->bits > KVANT_NUMBER_MAX_BITS || index_bits > KVANT_NUMBER_MAX_INDEX ||
        (lengths && layout->bits - index_bits > KVANT_NUMBER_MAX_LENGTHS))
        return KVANT_OK;
    kvant_code_numbers *numbers = kvant_alloc(1, sizeof *numbers + ((size_t)4 << index_bits) * sizeof(int16_t));
    if (!numbers)
        return kvant_fail(error, KVANT_ERR_MEMORY, "no memory for a codec");
    numbers->layout = layout;
    numbers->chunk = (kvant_chunk_numbers){
        .entries = numbers->entries, .components = components, .dim = codec->info.head_dim, .index_bits = index_bits
    };
    fill(numbers, directions, lengths);
    codec->numbers = numbers;
    set_table(codec);
    return KVANT_OK;
}

uint32_t kvant_codec_query_place(const kvant_codec *codec, uint32_t channel)
{
    if (codec->numbers) {
        const uint32_t size = codec->numbers->chunk.components;
        return 4 * (channel / size) + channel % size;
    }
    return channel / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS + kvant_token_position(channel % KVANT_PAGE_TOKENS);
}
