/* code_values.c - chunk codes as integers for attention on codes: tables of directions and lengths,
 * rounded to 16 bits.
 *
 * Rounding: a direction has 15 bits relative to its largest component, and a length has 12 bits.
 * Their product is rounded to a whole number, which counts steps. The direction's error is at most
 * 1/16 of a step. The errors of the length and of the product are at most 1/2 each.
 *
 * Directions of an octahedral codebook are computed in the kernel, from 1 / sqrt(x) in linear
 * pieces. The argument x lies in [U^2 / 3, U^2] / 2^15, and a piece has length 1024. The relative
 * error of a piece is at most 4.2e-4 (half of h^2 f" / 8 for the first piece). The roundings of
 * base, slope and product add 1.5 in 8000. Together this is 2.5 of 4095 steps. The roundings of
 * levels, squares and points add at most 1/2 step: they are 1/2, 3/2 and 1 in 10000. Rounding
 * entries to 13 bits adds 1/4 of a step. Rounding lengths to 14 bits adds 1/8 of a step. Rounding
 * the product adds 1/2. The sum is below 4 steps. */
#include <math.h>

#include "../base/alloc.h"
#include "codec_internal.h"

static void numbers_lines(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          kvant_code_lines *lines)
{
    kvant_codec_token_lines(codec, kernels, page, codec->product.integers.chunk->step, lines);
}

static float largest_of(const float *x, size_t n)
{
    float largest = 0;
    for (size_t i = 0; i < n; i++)
        largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    return largest;
}

/* Fills the tables for chunks of four: a direction per index, and a length per value of the code's
 * remaining bits. */
static void fill_directions(kvant_code_values *numbers, const float *directions)
{
    kvant_chunk_values *chunk = &numbers->chunk;
    const size_t n = (size_t)4 << chunk->index_bits;
    const float unit = largest_of(directions, n) / 32767;
    for (size_t i = 0; i < n; i++)
        numbers->entries[i] = (int16_t)lrintf(directions[i] / unit);
    chunk->step =
        KVANT_CODE_VALUE_MAX / (int32_t)((1u << (numbers->layout->bits - chunk->index_bits)) - 1);
    numbers->step = 32768 * unit * (1 / (float)chunk->step);
    numbers->error = 1.1f;
}

/* A computed entry stores the number 1 as 8180. An entry times LENGTH_MAX / 2^15, errors included,
 * is then at most KVANT_CODE_VALUE_MAX. */
#define ENTRY_UNIT 8180.0
#define LENGTH_MAX 16380

/* Fills the line for piece `piece` of 1 / sqrt(x). The line is too large by the same amount at both
 * ends of the piece, and too small by that amount where it is parallel to the curve. */
static void fill_piece(kvant_octahedral_integers *o, uint32_t piece, uint32_t of)
{
    const double factor = ENTRY_UNIT * sqrt(32768.0), x0 = 1024.0 * of, x1 = x0 + 1024;
    const double f0 = factor / sqrt(x0), slope = (factor / sqrt(x1) - f0) / 1024;
    const double parallel = pow(-2 * slope / factor, -2.0 / 3), chord = f0 - slope * x0;
    o->slope[piece] = (int16_t)lrint(slope * 32768);
    o->base[piece] = (int16_t)lrint((chord + factor / sqrt(parallel) - slope * parallel) / 2);
}

static void fill_triplets(kvant_code_values *numbers, const float *levels, const float *lengths)
{
    kvant_octahedral_integers *o = &numbers->octahedral;
    const uint32_t bits = numbers->chunk.index_bits / 2, n = 1u << bits;
    const uint32_t n_lengths = 1u << (numbers->layout->bits - 2 * bits);
    const uint32_t smallest =
        KVANT_OCTAHEDRAL_UNIT / 3 * (uint64_t)KVANT_OCTAHEDRAL_UNIT / 32768 / 1024;
    o->bits = bits;
    for (uint32_t i = 0; i < 1u << KVANT_NUMBER_MAX_INDEX / 2; i++)
        o->levels[i] = (int16_t)lrintf(levels[i % n] * KVANT_OCTAHEDRAL_UNIT);
    for (uint32_t i = 0; i < 32; i++)
        fill_piece(o, i, i < smallest ? smallest : i);
    for (uint32_t index = 0; index < n * n; index++)
        kvant_octahedral_entry(o, index % n, index / n, numbers->entries + (size_t)4 * index);
    const float unit = largest_of(lengths, n_lengths) / LENGTH_MAX;
    for (uint32_t k = 0; k < 1u << KVANT_NUMBER_MAX_LENGTHS; k++)
        numbers->chunk.lengths[k] = (int16_t)lrintf(lengths[k % n_lengths] / unit);
    if (bits <= KVANT_OCTAHEDRAL_MAX_BITS)
        numbers->chunk.octahedral = o;
    numbers->step = (float)(32768 / ENTRY_UNIT * unit);
    numbers->error = 4;
}

static uint32_t key_numbers(const kvant_codec *codec)
{
    const kvant_code_values *numbers = codec->product.integers.chunk;
    const uint32_t chunks = numbers->layout->n_chunks;
    return kvant_key_position(numbers->chunk.components, chunks + chunks % 2, 0);
}

static void set_product(kvant_codec *codec, kvant_code_values *numbers)
{
    const kvant_layout *layout = &codec->layout;
    kvant_code_product *product = &codec->product;
    const uint32_t block = KVANT_PAGE_TOKENS;
    const bool key = layout->role == KVANT_ROLE_K;
    *product = (kvant_code_product){ .lines = numbers_lines,
                                     .by_row = key,
                                     .n_bands = 1,
                                     .stride = block,
                                     .integers.chunk = numbers };
    product->band_tiles = key ? layout->column_tiles : layout->row_tiles;
    product->n_columns = key ? (key_numbers(codec) + block - 1) / block * block : block;
    int32_t limit =
        INT32_MAX / (KVANT_CODE_VALUE_MAX * (int32_t)(KVANT_TILE * layout->column_tiles));
    product->limit = limit < KVANT_CODE_OPERAND_MAX ? limit : KVANT_CODE_OPERAND_MAX;
}

/* Allocates *numbers, or sets it to NULL where codes are too wide or tables too large to pay. */
static kvant_status alloc_numbers(kvant_codec *codec, const kvant_chunk_layout *layout,
                                  uint32_t components, uint32_t index_bits, kvant_code_values **out)
{
    *out = NULL;
    if (layout->bits > KVANT_NUMBER_MAX_BITS || index_bits > KVANT_NUMBER_MAX_INDEX ||
        (components == 3 && layout->bits - index_bits > KVANT_NUMBER_MAX_LENGTHS))
        return KVANT_OK;
    kvant_code_values *numbers =
        kvant_alloc(1, sizeof *numbers + ((size_t)4 << index_bits) * sizeof(int16_t));
    KVANT_RETURN_IF(!numbers, KVANT_ERR_MEMORY);
    numbers->layout = layout;
    numbers->chunk = (kvant_chunk_values){ .entries = numbers->entries,
                                           .components = components,
                                           .dim = codec->info.head_dim,
                                           .index_bits = index_bits };
    set_product(codec, numbers);
    *out = numbers;
    return KVANT_OK;
}

kvant_status kvant_codec_offer_directions(kvant_codec *codec, const kvant_chunk_layout *layout,
                                          uint32_t index_bits, const float *directions)
{
    kvant_code_values *numbers;
    KVANT_FORWARD(alloc_numbers(codec, layout, 4, index_bits, &numbers));
    if (numbers)
        fill_directions(numbers, directions);
    return KVANT_OK;
}

kvant_status kvant_codec_offer_triplets(kvant_codec *codec, const kvant_chunk_layout *layout,
                                        uint32_t bits, const float *levels, const float *lengths)
{
    kvant_code_values *numbers;
    KVANT_FORWARD(alloc_numbers(codec, layout, 3, 2 * bits, &numbers));
    if (numbers)
        fill_triplets(numbers, levels, lengths);
    return KVANT_OK;
}

void kvant_codec_query_positions(const kvant_codec *codec, uint32_t n, uint32_t *places)
{
    const bool chunks = codec->view.kind == KVANT_CODES_CHUNK;
    const uint32_t size =
        chunks ? codec->product.integers.chunk->chunk.components : KVANT_PAGE_TOKENS;
    for (uint32_t i = 0; i < n; i++)
        places[i] = chunks ? kvant_key_position(size, i / size, i % size)
                           : i / size * size + kvant_token_position(i % size);
}
